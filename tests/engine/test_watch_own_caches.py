"""sinkscope.watch over caches that a model's own code keeps: tuples, buffers, objects, with no class of transformers.

What the steps compute is held against one pass over all tokens, column by column.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional

import sinkscope
from sinkscope.engine.watching.following import ASKED, Follower

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")

HEADS, WIDTH, VOCABULARY, ROOM = 4, 32, 50, 48
ATTEND = functional.scaled_dot_product_attention


class Store:
    """Keys and values of every layer, in an object that the caller keeps. `drops`: it keeps the first two tokens and
    so many of the newest."""

    def __init__(self, drops: int | None = None) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.drops = drops

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            old = self.layers[layer]
            key, value = torch.cat([old[0], key], 2), torch.cat([old[1], value], 2)
        kept = key, value
        if self.drops is not None and key.shape[2] > self.drops + 2:
            key, value = (torch.cat([each[:, :, :2], each[:, :, -self.drops :]], 2) for each in kept)
        self.layers[layer] = key, value
        return kept


class Attention(nn.Module):
    """Attention as people write it, over a cache of one of `KINDS`, with maps formed `by_hand` or torch's function."""

    def __init__(self, kind: str, by_hand: bool) -> None:
        super().__init__()
        self.kind, self.by_hand, self.groups = kind, by_hand, 2 if kind == "grouped" else HEADS
        self.query, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = nn.Linear(WIDTH, 2 * self.groups * WIDTH // HEADS)
        self.n_head, self.kept = HEADS, tuple[Tensor, Tensor]()
        if kind in ("buffer", "static"):
            shape = 4, self.groups, ROOM, WIDTH // HEADS
            self.register_buffer("keys", torch.zeros(shape), persistent=False)
            self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, x: Tensor, past: Any, layer: int, start: int) -> tuple[Tensor, Any]:
        rows, length = x.shape[:2]
        query = self.query(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        key, value = (part.unflatten(2, (self.groups, -1)).transpose(1, 2) for part in self.both(x).chunk(2, 2))
        if self.kind in ("buffer", "static"):
            self.keys[:rows, :, start : start + length] = key
            self.values[:rows, :, start : start + length] = value
            end = ROOM if self.kind == "static" else start + length
            key, value = self.keys[:rows, :, :end], self.values[:rows, :, :end]
        elif self.kind == "module":
            if start:
                key, value = (torch.cat([old, new], 2) for old, new in zip(self.kept, (key, value), strict=True))
            self.kept = key, value
        elif isinstance(past, Store):
            key, value = past.grown(layer, key, value)
        elif past is not None:
            key, value = torch.cat([past[layer][0], key], 2), torch.cat([past[layer][1], value], 2)
        returned = key, value
        key, value = (part.repeat_interleave(HEADS // self.groups, 1) for part in returned)
        first = start if self.kind == "static" else key.shape[2] - length
        seen = torch.arange(key.shape[2]) <= torch.arange(first, first + length)[:, None]
        if self.by_hand:
            logits = query @ key.mT / (WIDTH // HEADS) ** 0.5
            attended = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value
        else:
            attended = functional.scaled_dot_product_attention(query, key, value, seen)
        return self.out_proj(attended.transpose(1, 2).flatten(2)), returned


class Model(nn.Module):
    """Two layers of it, which return their keys and values where `kind` says so."""

    def __init__(self, kind: str, by_hand: bool = False) -> None:
        super().__init__()
        self.kind = kind
        self.tokens, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(ROOM, WIDTH)
        self.layers = nn.ModuleList(Attention(kind, by_hand) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, past: Any = None, start: int = 0) -> tuple[Tensor, Any]:
        x, returned = self.tokens(ids) + self.places.weight[start : start + ids.shape[1]], []
        for number, layer in enumerate(self.layers):
            out, kept = layer(x, past, number, start)
            x = x + out
            returned.append(kept)
        keeps = self.kind in ("tuple", "grouped")
        return self.head(x), tuple(returned) if keeps else past


KINDS = ["tuple", "grouped", "object", "buffer", "static", "module"]


def model_of(kind: str, by_hand: bool = False) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Model(kind, by_hand).eval()


def ids_of(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def step_by_step(
    model: Model, ids: Tensor, sizes: list[int], store: Store | None = None,
    between: Callable[[int, Any], Any] = lambda number, past: past,
) -> list[Tensor]:  # fmt: skip
    """The logits of each pass. `between` gets the number of the next pass, and what the last one returned."""
    past: Any = (store or Store()) if model.kind == "object" else None
    start, every = 0, []
    for number, piece in enumerate(ids.split(sizes, 1)):
        past = between(number, past) if number else past
        logits, past = model(piece, past, start)
        start += piece.shape[1]
        every.append(logits)
    return every


def in_one_pass(model: Model, *texts: Tensor) -> Any:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for ids in texts:
            model(ids, Store() if model.kind == "object" else None)
    assert not seen.left_out
    return seen.run()


@pytest.mark.parametrize("prompt", slow_but([1, 9], 9))
@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
@pytest.mark.parametrize("kind", slow_but(KINDS, "tuple", "static"))
def test_steps_give_the_numbers_of_one_pass(kind: str, by_hand: bool, prompt: int) -> None:
    model, first, second = model_of(kind, by_hand), ids_of(2, 20), ids_of(3, 20, 2)
    sizes = [prompt, *[1] * 6, 20 - prompt - 6]
    unwatched = [step_by_step(model, ids, sizes) for ids in (first, second)]
    with sinkscope.watch(model) as seen:
        watched = [step_by_step(model, ids, sizes) for ids in (first, second)]
    assert not seen.left_out
    assert all(
        torch.equal(*pair) for pairs in zip(unwatched, watched, strict=True) for pair in zip(*pairs, strict=True)
    )
    run = seen.run()
    assert run.manifest.data[0].sequences == 5
    assert_same(run, in_one_pass(model, first, second), atol=2e-5)
    assert run.manifest.data[0].fingerprint == in_one_pass(model, first, second).manifest.data[0].fingerprint


def test_a_model_that_gets_the_whole_text_in_each_step_reads_its_end() -> None:
    class Cutting(Model):
        def forward(self, ids: Tensor, past: Any = None, start: int = 0) -> tuple[Tensor, Any]:
            return super().forward(ids[:, start:], past, start)

    model, ids, past = Cutting("tuple").eval(), ids_of(2, 12), None
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for start, stop in zip([0, 8, 9, 10], [8, 9, 10, 12], strict=True):
            _, past = model(ids[:, :stop], past, start)
    assert not seen.left_out
    run, whole = seen.run(), in_one_pass(model, ids)
    assert_same(run, whole, atol=2e-5)
    assert run.manifest.data == whole.manifest.data


@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
def test_beams_are_followed(by_hand: bool) -> None:
    """Between two passes the caller puts the cache of a batch in another order."""
    model, ids, order = model_of("tuple", by_hand), ids_of(3, 14), torch.tensor([2, 2, 0])

    def reordered(number: int, past: Any) -> Any:
        return tuple(tuple(part[order] for part in layer) for layer in past) if number == 3 else past

    with sinkscope.watch(model) as seen:
        step_by_step(model, ids, [10, 1, 1, 1, 1], between=reordered)
    assert not seen.left_out
    chosen = torch.cat([ids[order, :12], ids[:, 12:]], 1)
    assert_same(seen.run(), in_one_pass(model, chosen), atol=2e-5)


def shares_of_first(attend: Any, found: list[Tensor]) -> Any:
    """`attend`, which notes the share of the first key in each query's attention, [B, H, Tq], in float64."""

    def noting(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        logits = query.double() @ key.double().mT / query.shape[3] ** 0.5
        found.append(logits.masked_fill(~mask, -torch.inf).softmax(-1)[..., 0])
        return attend(query, key, value, mask)  # type: ignore[no-any-return]

    return noting


def test_keys_that_a_cache_drops_are_seen_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, store = model_of("object"), ids_of(2, 16), Store(drops=4)
    with sinkscope.watch(model) as seen:
        step_by_step(model, ids, [8, *[1] * 8], store)
    assert not seen.left_out
    run, found = seen.run(), list[Tensor]()
    monkeypatch.setattr(functional, "scaled_dot_product_attention", shares_of_first(ATTEND, found))
    step_by_step(model, ids, [8, *[1] * 8], Store(drops=4))
    by_layer = [torch.cat(found[layer::2], 2)[..., 1:].mean((0, 2)) for layer in range(2)]
    assert run.manifest.data[0].seq_len == 16
    np.testing.assert_allclose(run.heads["bos_mass"], torch.cat(by_layer), atol=1e-6)
    assert not np.allclose(run.heads["bos_mass"], in_one_pass(model, ids).heads["bos_mass"], atol=1e-3)


@pytest.mark.parametrize("kind", slow_but(["tuple", "module", "static"], "module"))
def test_each_second_batch_is_measured_with_its_steps(kind: str) -> None:
    model, texts = model_of(kind), [ids_of(2, 12, seed) for seed in range(4)]
    with sinkscope.watch(model, every=2) as seen:
        for ids in texts:
            step_by_step(model, ids, [6, 1, 1, 4])
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, texts[0], texts[2]), atol=2e-5)


class Plain(Model):
    """Keeps its keys where it is asked to."""

    def forward(self, ids: Tensor, past: Any = None, start: int = 0, keep: bool = True) -> tuple[Tensor, Any]:
        logits, kept = super().forward(ids, past, start)
        return logits, kept if keep else None


@pytest.mark.parametrize("sizes", slow_but([[6, 1, 1, 4], [1] * 12], [6, 1, 1, 4]))
def test_the_steps_of_a_batch_that_is_not_wanted_are_none_of_their_own(sizes: list[int]) -> None:
    """Also where no pass before it kept its keys."""
    model, texts = Plain("tuple").eval(), [ids_of(2, 12, seed) for seed in range(4)]
    with torch.no_grad(), sinkscope.watch(model, every=2) as seen:
        model(texts[0], keep=False)
        for ids in texts[1:]:
            step_by_step(model, ids, sizes)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, texts[0], texts[2]), atol=2e-5)


def test_passes_that_are_not_wanted_are_soon_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation of hours of which few passes are measured costs next to nothing."""
    heard, wants = list[bool](), Follower._wants
    monkeypatch.setattr(Follower, "_wants", lambda self, now: heard.append(wants(self, now)) or heard[-1])
    model = Plain("tuple").eval()
    with torch.no_grad(), sinkscope.watch(model, every=100) as seen:
        for seed in range(2 * ASKED):
            model(ids_of(2, 8, seed), keep=False)
    assert heard == [True] * (1 + ASKED) + [False] * (ASKED - 1)
    assert len(seen.run().sequences["sequence"].unique()) == 2


def test_no_more_than_the_limit_is_measured() -> None:
    model = model_of("tuple")
    with sinkscope.watch(model, limit=2) as seen:
        for seed in range(3):
            step_by_step(model, ids_of(2, 12, seed), [6, 1, 1, 4])
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, ids_of(2, 12, 0)), atol=2e-5)


@pytest.mark.parametrize("kind", slow_but(["tuple", "module", "static"], "tuple", "static"))
def test_a_sequence_is_measured_until_it_is_long_enough(kind: str) -> None:
    model, texts = model_of(kind), [ids_of(2, 12, seed) for seed in range(2)]
    with sinkscope.watch(model, until=7) as seen:
        for ids in texts:
            step_by_step(model, ids, [6, 1, 1, 4])
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, *(ids[:, :7] for ids in texts)), atol=2e-5)


def test_a_label_ends_the_sequences_under_way() -> None:
    model, ids = model_of("tuple"), ids_of(2, 12)

    with sinkscope.watch(model) as seen:
        seen.label("begun")
        step_by_step(
            model,
            ids,
            [6, 1, 1, 4],
            between=lambda number, past: (seen.label("later") or past) if number == 3 else past,
        )
        step_by_step(model, ids, [6, 6])
    assert not seen.left_out
    run = seen.run()
    assert [(facts.domain, facts.seq_len) for facts in run.manifest.data] == [("begun", 8), ("later", 12)]


def test_a_prefix_that_two_texts_share_is_told() -> None:
    """The second goes on with a cache that has moved on in another copy: its first tokens were read long ago."""
    model, ids = model_of("tuple"), ids_of(2, 16)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        _, prefix = model(ids[:, :8])
        model(ids[:, 8:12], prefix, 8)
        model(ids[:, 12:16], prefix, 8)
    run = seen.run()
    assert run.manifest.data[0].seq_len == 12
    (told,) = seen.left_out
    assert told == "layers.0 attends to keys in the model's own cache that the last pass did not leave there"


def test_another_text_of_the_same_length_is_not_joined() -> None:
    """Its keys are other ones: the first pass of a text that nobody watched must not stand before its steps."""
    model, ids, other = model_of("tuple"), ids_of(2, 12), ids_of(2, 12, 5)
    with torch.no_grad():
        _, unseen = model(other[:, :8])
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:, :8])
        model(other[:, 8:], unseen, 8)
    assert_same(seen.run(), in_one_pass(model, ids[:, :8]), atol=2e-5)
    (told,) = seen.left_out
    assert told == "layers.0 attends to keys in the model's own cache that the last pass did not leave there"


def test_an_error_in_a_step_ends_its_sequences() -> None:
    model, ids = model_of("tuple"), ids_of(2, 12)

    def stop(module: nn.Module, args: Any, output: Any) -> None:
        raise RuntimeError("stopped")

    with torch.no_grad(), sinkscope.watch(model) as seen:
        _, past = model(ids[:, :8])
        hook = model.layers[1].register_forward_hook(stop)
        with pytest.raises(RuntimeError, match="stopped"):
            model(ids[:, 8:], past, 8)
        hook.remove()
        model(ids[:, 8:], past, 8)
    assert_same(seen.run(), in_one_pass(model, ids[:, :8]), atol=2e-5)
    assert seen.left_out[0] == "a pass raised an error: its sequences are measured up to the pass before"


class Vectors(nn.Module):
    """A single layer over vectors, whose cache is in lists that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = model_of("tuple").layers[0]

    def forward(self, x: Tensor, kept: list[list[Any]]) -> Tensor:
        past = kept[-1] if kept else None
        out, returned = self.attention(x, None if past is None else [past], 0, 0)
        kept.append([*returned])
        return out  # type: ignore[no-any-return]


def test_a_list_that_the_caller_keeps_is_followed() -> None:
    model, x, kept = (
        Vectors().eval(),
        torch.randn(2, 16, WIDTH, generator=torch.Generator().manual_seed(3)),
        list[Any](),
    )
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for piece in x.split([8, 1, 1, 6], 1):
            model(piece, kept)
    with torch.no_grad(), sinkscope.watch(model) as whole:
        model(x, [])
    assert not seen.left_out
    assert_same(seen.run(), whole.run(), atol=2e-5)


def test_what_was_measured_is_let_go() -> None:
    model, ids = model_of("tuple"), ids_of(2, 12)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        _, past = model(ids)
        kept = weakref.ref(past[0][0])
        del past
        model(ids)
        model(ids)
        assert kept() is None
    assert np.isfinite(seen.run().heads["bos_mass"]).all()
