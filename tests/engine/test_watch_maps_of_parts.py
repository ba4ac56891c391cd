"""Attention over something else than all positions of a sequence, in networks of a person's own: read, or named."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from own_code import READ, Writer, hidden, ids_of
from own_code import Attention as OwnAttention
from plain_models import HEADS, VOCABULARY, WIDTH
from torch import Tensor, nn
from torch.nn import functional

import sinkscope

Maps = list[Tensor]


class Attention(nn.Module):
    """From `x` to `read`, which may be another text. `by_torch`: torch's function, else a product by hand. It keeps its
    maps. `named`: it names its number of heads."""

    def __init__(self, by_torch: bool = False, named: bool = True) -> None:
        super().__init__()
        self.by_torch, self.maps = by_torch, Maps()
        if named:
            self.num_heads = HEADS
        self.q, self.k, self.v, self.proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
        read = x if read is None else read
        query, key, value = (
            layer(given).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, given in ((self.q, x), (self.k, read), (self.v, read))
        )
        logits = query @ key.mT * query.shape[-1] ** -0.5
        self.maps.append((logits - logits.logsumexp(-1, keepdim=True)).exp().detach())
        if self.by_torch:
            mixed = functional.scaled_dot_product_attention(query, key, value)
        else:
            mixed = logits.softmax(-1) @ value
        return self.proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Runs `step(self, hidden states of the ids)`; its attention modules are `first` and `second`."""

    def __init__(self, step: Callable[[Any, Tensor], Tensor], make: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.tokens, self.first, self.second = nn.Embedding(VOCABULARY, WIDTH), make(), make()
        self.step = step
        self.eval()

    def forward(self, ids: Tensor) -> Tensor:
        return self.step(self, self.tokens(ids))


def watched(model: nn.Module, *inputs: Tensor) -> tuple[Any, list[str]]:
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(*inputs)
        return seen.run(), seen.left_out


def bos_mass(maps: Tensor) -> np.ndarray[Any, Any]:
    return maps[:, :, 1:, 0].mean((0, 2)).numpy()  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("one_first", [True, False])
def test_a_call_from_one_position_is_named_beside_the_others_of_its_module(one_first: bool, by_torch: bool) -> None:
    def step(model: Any, x: Tensor) -> Tensor:
        x = model.second(x)
        if one_first:
            return model.second(x[:, :1], x) + model.first(model.second(x))  # type: ignore[no-any-return]
        return model.first(model.second(x)) + model.second(x[:, :1], x)  # type: ignore[no-any-return]

    model = Net(step, lambda: Attention(by_torch))
    run, left_out = watched(model, ids_of())
    assert left_out == ["attention from one position alone was not read: second"]
    calls = [0, 2] if one_first else [0, 1]
    names = ["second", f"second[{calls[1]}]", "first"]
    assert list(dict.fromkeys(run.heads["module"])) == names
    exact = [model.second.maps[calls[0]], model.second.maps[calls[1]], model.first.maps[0]]
    np.testing.assert_allclose(run.heads["bos_mass"], np.concatenate([*map(bos_mass, exact)]), atol=1e-6)
    with pytest.raises(sinkscope.SinkscopeError, match="from one position in some of its calls"):
        sinkscope.scan(model, data=ids_of())


@pytest.mark.parametrize("by_torch", [True, False])
def test_keys_that_a_module_pools_are_not_read(by_torch: bool) -> None:
    """They are no positions of another text."""

    class Pooling(Attention):
        def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
            return super().forward(x, x.unflatten(1, (-1, 4)).mean(2))

    model = Net(lambda model, x: model.second(x) + model.first(x), lambda: Pooling(by_torch))
    model.first = Attention(by_torch).eval()
    run, _ = watched(model, ids_of())
    assert run.layers["module"].tolist() == ["first"]
    assert "attention that is no map of queries and keys was not read: second" in run.manifest.warnings
    assert sinkscope.scan(model, data=ids_of()).layers["module"].tolist() == ["first"]


class Channels(nn.Module):
    """Attention among the channels of each head, [B, D, H, W]."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.qkv = HEADS, nn.Conv2d(WIDTH, 3 * WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (each.flatten(2).unflatten(1, (HEADS, -1)) for each in self.qkv(x).chunk(3, 1))
        return ((query @ key.mT).softmax(-1) @ value).reshape(x.shape)


class Windows(nn.Module):
    """Pads a picture, [B, H, W, D], to one window of 25 positions, and attends in it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = Attention()

    def forward(self, x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, 5 - x.shape[2], 0, 5 - x.shape[1]))
        return x + self.attn(padded.flatten(1, 2)).unflatten(1, (5, 5))[:, : x.shape[1], : x.shape[2]]  # type: ignore[no-any-return]


@pytest.mark.parametrize("way", ["channels", "padded"])
def test_channels_and_padded_windows_of_a_picture_are_no_positions(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Channels() if way == "channels" else Windows()).eval()
    picture = torch.randn(2, WIDTH, 4, 4) if way == "channels" else torch.randn(2, 4, 4, WIDTH)
    with pytest.raises(sinkscope.SinkscopeError, match="no map of queries and keys was not read: 0"):
        watched(model, picture)


def test_a_whole_picture_in_one_window_is_read() -> None:
    model = nn.Sequential(Windows()).eval()
    run, _ = watched(model, torch.randn(2, 5, 5, WIDTH))
    np.testing.assert_allclose(run.heads["bos_mass"], bos_mass(model[0].attn.maps[0]), atol=1e-6)


@pytest.mark.parametrize("by_torch", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_another_text_is_read_without_a_number_of_heads_in_the_code(shared: bool, by_torch: bool) -> None:
    """`shared`: all sequences read the keys of one."""
    torch.manual_seed(0)
    memory = torch.randn(1 if shared else 3, 17, WIDTH)

    def step(model: Any, x: Tensor) -> Tensor:
        return model.second(model.first(x), memory)  # type: ignore[no-any-return]

    model = Net(step, lambda: Attention(by_torch, named=False))
    run, left_out = watched(model, ids_of(3, 24))
    assert left_out == []
    assert run.layers["stream"].tolist() == ["text", "cross"]
    exact = [*bos_mass(model.first.maps[0]), *bos_mass(model.second.maps[0])]
    np.testing.assert_allclose(run.heads["bos_mass"], exact, atol=1e-6)


def test_another_text_may_be_given_by_keywords_to_a_module_that_is_named_for_pictures() -> None:
    """As the last attention of Segment Anything."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.own, self.token_to_image = nn.Embedding(VOCABULARY, WIDTH), Attention(), Attention()

        def forward(self, ids: Tensor, image: Tensor) -> Tensor:
            return self.token_to_image(x=self.own(self.tokens(ids)), read=image)  # type: ignore[no-any-return]

    run, left_out = watched(Reader().eval(), ids_of(3, 24), torch.randn(3, 17, WIDTH))
    assert left_out == []
    assert run.layers["module"].tolist() == ["own", "token_to_image"]


def test_cross_attention_is_told_by_the_name_of_the_annotated_transformer() -> None:
    """Where both texts are of one length, nothing else tells it."""

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tokens, self.self_attn, self.src_attn = nn.Embedding(VOCABULARY, WIDTH), Attention(), Attention()

        def forward(self, ids: Tensor) -> Tensor:
            x = self.tokens(ids)
            return self.src_attn(self.self_attn(x), x.flip(1))  # type: ignore[no-any-return]

    run, _ = watched(Decoder().eval(), ids_of())
    assert run.layers["stream"].tolist() == ["text", "cross"]


def _again(attention: OwnAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    maps = _windowed(query, key).softmax(-1)
    return maps.masked_fill(~_seen(query.shape[2]), 0.0) @ value


def _once(attention: OwnAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return _windowed(query, key).softmax(-1) @ value


def _seen(length: int) -> Tensor:
    return ~hidden(length) & ~torch.ones(length, length, dtype=torch.bool).tril(-5)


def _windowed(query: Tensor, key: Tensor) -> Tensor:
    logits = query @ key.mT * query.shape[-1] ** -0.5
    return logits.masked_fill(~_seen(query.shape[2]), -torch.inf)


@pytest.mark.parametrize("read", READ)
def test_a_map_that_is_masked_again_behind_its_softmax_is_the_same_map(read: Any) -> None:
    again, once = (read(Writer(lambda way=way: OwnAttention(way)), ids_of()) for way in (_again, _once))
    ours, theirs = (run.heads.select_dtypes("number").to_numpy(float) for run in (again, once))
    np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
    assert again.heads["sink_margin"].notna().any()


class Dropping(nn.Linear):
    """A linear layer that drops some of what it reads, as LoRA's do, or counts its passes, as a calibration does."""

    seen = 0.0

    def forward(self, x: Tensor) -> Tensor:
        self.seen = max(self.seen, float(x.detach().abs().max()))
        return super().forward(functional.dropout(x, 0.3, self.training))


@pytest.mark.parametrize("layer", ["dropping", "spectral norm"])
def test_a_projection_is_not_run_for_its_weight(layer: str) -> None:
    """Its dropout would take random numbers from the program, and its calibration would see ours."""

    def losses(watch: bool) -> list[float]:
        torch.manual_seed(0)
        model = Net(lambda model, x: model.second(model.first(x)))
        if layer == "dropping":
            model.first.proj = Dropping(WIDTH, WIDTH)
        else:
            model.first.proj = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
            model.second.q = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))
        model.train()
        values = []
        optimiser = torch.optim.SGD(model.parameters(), 0.1)
        with sinkscope.watch(model) if watch else torch.enable_grad():
            for seed in range(3):
                loss = model(ids_of().roll(seed, 1)).square().mean()
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
                values.append(float(loss.detach()))
        return [*values, getattr(model.first.proj, "seen", 0.0), float(torch.rand(1))]

    assert losses(True) == losses(False)


def _turned(attention: OwnAttention, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return (value.mT @ _once_map(query, key).mT).mT


def _once_map(query: Tensor, key: Tensor) -> Tensor:
    return _windowed(query, key).softmax(-1)


@pytest.mark.parametrize("read", ["watched", "scanned"])
def test_a_layer_behind_one_that_is_not_read_is_read(read: str) -> None:
    """What the first makes of its map reaches the second in the residual stream."""
    ways = iter([_turned, _once])
    model, ids = Writer(lambda: OwnAttention(next(ways))), ids_of()
    run = watched(model, ids)[0] if read == "watched" else sinkscope.scan(model, data=ids)
    assert run.layers["module"].tolist() == ["blocks.1.attn"]
    assert run.manifest.warnings[0] == "attention that is no map of queries and keys was not read: blocks.0.attn"


def test_calls_that_are_left_out_tell_no_length() -> None:
    """Attention over the series of a batch, as Chronos-2's groups, has another number of positions."""

    class Series(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Attention(), Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).transpose(0, 1)).transpose(0, 1)  # type: ignore[no-any-return]

    torch.manual_seed(0)
    run, _ = watched(Series().eval(), torch.randn(12, 9, WIDTH))
    assert run.layers["module"].tolist() == ["first"]
    assert run.manifest.data[0].seq_len == 9


def test_windows_of_one_picture_in_one_axis_with_the_heads_are_windows() -> None:
    """Nothing that the user could give makes them sequences."""

    class Folded(Attention):
        def forward(self, x: Tensor, read: Tensor | None = None) -> Tensor:
            parts = x.unflatten(1, (4, -1)).flatten(0, 1)
            query, key, value = (
                layer(parts).unflatten(-1, (HEADS, -1)).transpose(1, 2).flatten(0, 1)
                for layer in (self.q, self.k, self.v)
            )
            mixed = (query @ key.mT).softmax(-1) @ value
            mixed = mixed.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)
            return self.proj(mixed).unflatten(0, (-1, 4)).flatten(1, 2) * 1.5  # type: ignore[no-any-return]

    model = Net(lambda model, x: model.second(x) + model.first(x), Folded)
    model.first = Attention().eval()
    run, left_out = watched(model, ids_of(1, 24))
    assert run.layers["module"].tolist() == ["first"]
    assert "attention that is no map of queries and keys was not read: second" in [*left_out, *run.manifest.warnings]
