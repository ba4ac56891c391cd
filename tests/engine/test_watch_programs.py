"""sinkscope.watch in programs that call a model in unusual ways: windows, repeats, checkpoints, pieces of a model."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from watched import warnings_of

import sinkscope

WIDTH, HEADS = 32, 4


class Attention(nn.Module):
    """Bidirectional, through torch's function; `own`: by two products, after which `gate` is written into."""

    def __init__(self, own: bool = False, gate: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_heads, self.own, self.gate = HEADS, own, gate
        self.qkv, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        if not self.own:
            mixed = functional.scaled_dot_product_attention(q, k, v)
        else:
            mixed = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
            if self.gate:
                {"v": v, "k": k}[self.gate].mul_(10)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def vectors(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, length, WIDTH, generator=torch.Generator().manual_seed(seed))


def mass(attention: Attention, x: Tensor) -> np.ndarray:
    """bos_mass of each head in float64, mean over sequences."""
    q, k, _ = (
        (x.double() @ attention.qkv.weight.double().mT + attention.qkv.bias).unflatten(-1, (3, HEADS, -1)).unbind(2)
    )
    logits = torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5
    return np.asarray(logits.softmax(-1)[:, :, 1:, 0].mean((0, 2)).detach())


class Windows(nn.Module):
    """Attention in windows of eight, then over everything."""

    def __init__(self) -> None:
        super().__init__()
        self.local, self.wide = Attention(), Attention()

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(-1, min(8, x.shape[1]), WIDTH)
        return self.wide(x + self.local(windows).reshape(x.shape))  # type: ignore[no-any-return]


@pytest.mark.parametrize("lengths", [(8, 32), (32, 8)])
def test_one_window_does_not_decide_for_several(lengths: tuple[int, int]) -> None:
    """Where the whole sequence is one window, its map is whole: in the other pass `local` is not read."""
    model = Windows().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for length in lengths:
            seen.label(str(length))
            model(vectors(2, length))
    run = seen.run()
    assert set(zip(run.heads["domain"], run.heads["module"], strict=True)) == {
        ("8", "local"), ("8", "wide"), ("32", "wide"),
    }  # fmt: skip
    short = run.heads[(run.heads["domain"] == "8") & (run.heads["module"] == "local")]
    np.testing.assert_allclose(short["bos_mass"], mass(model.local, vectors(2, 8)), atol=1e-6)


@pytest.mark.parametrize("lengths", [(14, 9), (9, 14)])
def test_a_module_reads_two_lengths_in_one_pass(lengths: tuple[int, int]) -> None:
    class Twins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Attention()

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return self.attend(a).mean(1) - self.attend(b).mean(1)  # type: ignore[no-any-return]

    model, inputs = Twins().eval(), [vectors(2, length, length) for length in lengths]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(*inputs)
    heads = seen.run().heads
    for number, given in enumerate(inputs):
        own = heads[heads["module"] == ("attend" if number == 0 else "attend[1]")]
        np.testing.assert_allclose(own["bos_mass"], mass(model.attend, given), atol=1e-6)


def test_the_watched_module_may_attend_itself() -> None:
    model = Attention().eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(vectors(3, 12))
    heads = seen.run().heads
    np.testing.assert_allclose(heads["bos_mass"], mass(model, vectors(3, 12)), atol=1e-6)
    assert heads["honor"].notna().all(), "its output projection is found"
    whole = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = vectors(3, 12)
    with torch.no_grad(), sinkscope.watch(whole) as seen:
        whole(x, x, x, need_weights=False)
    with torch.no_grad():
        maps = whole(x, x, x, average_attn_weights=False)[1]
    np.testing.assert_allclose(seen.run().heads["bos_mass"], maps[:, :, 1:, 0].mean((0, 2)), atol=1e-6)


def test_a_reset_measures_again_after_the_limit() -> None:
    model = Attention().eval()
    with torch.no_grad(), sinkscope.watch(model, limit=3) as seen:
        for seed in range(4):
            model(vectors(1, 12, seed))
        assert seen.sequences == 3
        seen.reset()
        assert seen.sequences == 0
        model(vectors(1, 12, 9))
        assert seen.sequences == 1
    np.testing.assert_allclose(seen.run().heads["bos_mass"], mass(model, vectors(1, 12, 9)), atol=1e-6)
    assert not model._forward_hooks
    seen.reset()
    assert not model._forward_hooks, "the block has ended"


class Checkpointed(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(2)])
        self.options = options

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, **self.options)
        return x


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize(
    ("every", "limit", "measured"), slow_but([(1, None, 12), (2, None, 6), (1, 8, 8)], (2, None, 6))
)
def test_what_a_backward_pass_computes_again_is_no_pass(
    reentrant: bool, every: int, limit: int | None, measured: int
) -> None:
    model = Checkpointed(use_reentrant=reentrant).train()
    with sinkscope.watch(model, every=every, limit=limit) as seen:
        for seed in range(6):
            model(vectors(2, 10, seed).requires_grad_()).square().mean().backward()
    run = seen.run()
    assert run.manifest.sequences_done == measured
    assert set(run.heads["module"]) == {"blocks.0", "blocks.1"}
    assert warnings_of(run) == []


@pytest.mark.parametrize("gate", ["k", "v"])
def test_what_is_written_after_a_map_was_formed_is_not_read(gate: str) -> None:
    """In inference mode torch counts no writes."""

    def measured(gate: str) -> Any:
        model = Attention(own=True, gate=gate).eval()
        with torch.inference_mode(), sinkscope.watch(model) as seen:
            model(vectors(2, 12))
        return seen.run().heads

    written, plain = measured(gate), measured("")
    assert written["k_norm_first"].notna().all()
    for column in ("bos_mass", "avvn", "k_norm_first", "honor"):
        np.testing.assert_array_equal(written[column], plain[column], err_msg=column)


def test_axes_of_a_video_do_not_stand_for_its_batch() -> None:
    """Frames that attend to each other are folded windows, however many there are."""

    class Axial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.space, self.wide = Attention(), Attention()

        def forward(self, x: Tensor) -> Tensor:
            rows, frames, places = x.shape[:3]
            x = x + self.space(x.reshape(rows * frames, places, WIDTH)).reshape(x.shape)
            return self.wide(x.reshape(rows, frames * places, WIDTH))  # type: ignore[no-any-return]

    model = Axial().eval()
    for rows in (1, 2, 4):
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(torch.randn(rows, 4, 6, WIDTH))
        run = seen.run()
        assert set(run.heads["module"]) == {"wide"}
        assert run.manifest.sequences_done == rows


class Rewritten(nn.Module):
    """Attention whose map or logits are written into, or cut, between the softmax and the product."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Attention()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        logits = q @ k.mT * q.shape[-1] ** -0.5
        if self.how == "null key":
            logits = torch.cat([torch.zeros_like(logits[..., :1]), logits], -1)
        weights = logits.softmax(-1)
        if self.how == "own logits":
            weights = torch.softmax(logits, -1, out=logits)
        elif self.how == "logits reused":
            logits.zero_()
        elif self.how == "null key":
            weights = weights[..., 1:]
        elif self.how == "head silenced":
            weights[:, 1, :, 0] = 0.0
        return self.inner.out_proj((weights @ v).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def maps(attention: Attention, x: Tensor, how: str) -> Tensor:
    """The maps of `Rewritten` in float64."""
    q, k, _ = (
        (x.double() @ attention.qkv.weight.double().mT + attention.qkv.bias).unflatten(-1, (3, HEADS, -1)).unbind(2)
    )
    shares = (torch.einsum("bihd,bjhd->bhij", q, k) * q.shape[-1] ** -0.5).exp()
    weights = shares / (shares.sum(-1, keepdim=True) + (how == "null key"))
    if how == "head silenced":
        weights[:, 1, :, 0] = 0.0
    return weights.detach()


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("how", ["own logits", "logits reused", "null key", "head silenced"])
def test_logits_that_do_not_belong_to_the_map_are_not_read(how: str, inference: bool) -> None:
    model, x = Rewritten(how).eval(), vectors(2, 12)
    with torch.inference_mode(inference), torch.no_grad(), sinkscope.watch(model) as seen:
        model(x)
    heads, expected = seen.run().heads, maps(model.inner, x, how)
    first = expected[..., 0]
    np.testing.assert_allclose(heads["bos_mass"], first[:, :, 1:].mean((0, 2)), atol=1e-6)
    largest = (first >= expected.amax(-1))[:, :, 1:].double().mean((0, 2))
    np.testing.assert_allclose(heads["first_argmax"], largest, atol=1e-6)
    assert heads[["sink_margin", "logit_gap"]].isna().all(axis=None), "the logits are lost"
    if how in ("null key", "head silenced"):
        empty = ["entropy", "uniformity", "learned_sink_mass", "first4_boost", "sink_elsewhere"]
        assert heads[empty].isna().all(axis=None), "this attention is no softmax over the keys"
    else:
        entropy = torch.special.entr(expected).sum(-1).mean((0, 2))
        np.testing.assert_allclose(heads["entropy"], entropy, atol=1e-6)
        assert (heads["learned_sink_mass"] == 0).all()


class Folded(nn.Module):
    """Attention over sequences and heads in one axis, in either order; `mixed` joins something to its output."""

    def __init__(self, order: str, own: bool, mixed: bool) -> None:
        super().__init__()
        self.order, self.own, self.mixed, self.inner = order, own, mixed, Attention()
        self.num_heads = HEADS

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.transpose(*((0, 1) if self.order == "heads first" else (0, 0))).flatten(0, 1)
            for part in self.inner.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        )
        if self.own:
            out = (torch.bmm(q, k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            out = functional.scaled_dot_product_attention(q, k, v)
        out = out + q if self.mixed else out
        if self.order == "heads first":
            out = out.unflatten(0, (HEADS, len(x))).transpose(0, 1)
        else:
            out = out.unflatten(0, (len(x), HEADS))
        return self.inner.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize(
    ("order", "mixed", "why"),
    [
        ("sequences first", False, None),
        ("heads first", False, "folds heads before sequences"),
        ("heads first", True, "in an order that no module's input shows"),
        ("sequences first", True, "in an order that no module's input shows"),
    ],
)
def test_heads_before_sequences_are_not_read_as_sequences(order: str, mixed: bool, why: str | None, own: bool) -> None:
    model = Folded(order, own, mixed).eval()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(vectors(1, 12))
    np.testing.assert_allclose(seen.run().heads["bos_mass"], mass(model.inner, vectors(1, 12)), atol=1e-6)
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(vectors(HEADS, 12))
    if why is None:
        np.testing.assert_allclose(seen.run().heads["bos_mass"], mass(model.inner, vectors(HEADS, 12)), atol=1e-6)
    else:
        assert len(seen.left_out) == 1
        assert why in seen.left_out[0]


class InPieces(nn.Module):
    """Causal attention that computes `step` queries at a time, by product or by torch's function."""

    def __init__(self, own: bool, step: int, short_keys: bool = False) -> None:
        super().__init__()
        self.own, self.step, self.short_keys, self.inner = own, step, short_keys, Attention()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        length, out = x.shape[1], []
        for start in range(0, length, self.step):
            stop = min(start + self.step, length)
            seen = stop if self.short_keys else length
            mask = torch.ones(length, length, dtype=torch.bool).tril()[start:stop, :seen]
            part, keys, values = q[:, :, start:stop], k[:, :, :seen], v[:, :, :seen]
            if self.own:
                logits = (part @ keys.mT * q.shape[-1] ** -0.5).masked_fill(~mask, -torch.inf)
                out.append(logits.softmax(-1) @ values)
            else:
                out.append(functional.scaled_dot_product_attention(part, keys, values, mask))
        return self.inner.out_proj(torch.cat(out, 2).transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("short_keys", [False, True])
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("own", [False, True])
def test_queries_in_pieces_are_no_cross_attention(own: bool, step: int, short_keys: bool) -> None:
    model = InPieces(own, step, short_keys).eval()
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(vectors(2, 13))
    with pytest.raises(sinkscope.SinkscopeError, match=r"no attention|was not read: the model itself"):
        seen.run()


class OneByOne(nn.Module):
    """Attends to each sequence of a batch, or with each head, in a call of its own."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.tokens, self.axis, self.inner = nn.Embedding(20, WIDTH), axis, Attention()

    def forward(self, ids: Tensor) -> Tensor:
        parts = self.inner.qkv(self.tokens(ids)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        calls = zip(*(part.unbind(self.axis) for part in parts), strict=True)
        out = torch.stack([functional.scaled_dot_product_attention(*call) for call in calls], self.axis)
        return self.inner.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def test_a_call_for_each_sequence_is_not_a_batch() -> None:
    model = OneByOne(0).eval()
    ids = torch.arange(36).reshape(3, 12) % 20
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(ids)
    (told,) = seen.left_out
    assert "attended over 1 row at once where 3 sequences were given" in told
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:1])
    x = model.tokens(ids[:1])
    np.testing.assert_allclose(seen.run().heads["bos_mass"], mass(model.inner, x.detach()), atol=1e-6)


def test_attention_that_is_not_read_is_not_said_to_be_absent() -> None:
    class Exponentials(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.mT * q.shape[-1] ** -0.5).exp()
            out = weights / weights.sum(-1, keepdim=True) @ v
            return self.out_proj(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    class LastAxis(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).unbind(2)
            weights = torch.einsum("bihd,bjhd->bijh", q, k).softmax(2)
            return self.out_proj(torch.einsum("bijh,bjhd->bihd", weights, v).flatten(2))  # type: ignore[no-any-return]

    for model, why in (
        (Exponentials(), "no attention of Exponentials was read: it has none, computes it in a way that is not read"),
        (LastAxis(), "attention that is no map of queries and keys was not read: the model itself"),
    ):
        with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model.eval()) as seen:
            warnings.simplefilter("ignore")
            model(vectors(2, 12))
        with pytest.raises(sinkscope.SinkscopeError, match=why):
            seen.run()


def test_attention_among_channels_is_no_sequence() -> None:
    class Channels(Attention):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (part.mT for part in self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4))
            out = (q @ k.mT).softmax(-1) @ v
            return self.out_proj(out.permute(0, 3, 1, 2).flatten(2))  # type: ignore[no-any-return]

    model = nn.Sequential(Channels(own=True)).eval()
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(vectors(2, 20))
    assert seen.left_out == ["attention that is no map of queries and keys was not read: 0"]


def test_sequences_of_vectors_in_turn_are_not_a_batch() -> None:
    class InTurn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.attend(one) for one in x.split(1)])

    model = InTurn().eval()
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("ignore")
        model(vectors(3, 12))
    assert "attended over 1 row at once where 3 sequences were given" in seen.left_out[0]
