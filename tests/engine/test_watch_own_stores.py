"""sinkscope.watch over caches of a model's own: where they are kept, batches that change, passes that do not go on."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional

import sinkscope

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")

HEADS, WIDTH, VOCABULARY, ROOM = 4, 32, 50, 32
SIZES = [9, 1, 1, 1, 4, 4]


class Nested:
    """Keys and values in a tuple in a dict in an object, which the model does not return."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if layer in self.layers:
            key, value = (torch.cat(pair, 2) for pair in zip(self.layers[layer], (key, value), strict=True))
        self.layers[layer] = key, value
        return key, value

    @property
    def start(self) -> int:
        return self.layers[0][0].shape[2] if self.layers else 0

    def take(self, rows: Tensor) -> None:
        self.layers = {layer: (key[rows], value[rows]) for layer, (key, value) in self.layers.items()}

    def crop(self, length: int) -> None:
        self.layers = {layer: (key[:, :, :length], value[:, :, :length]) for layer, (key, value) in self.layers.items()}


class Slots(Nested):
    """The same, without a dict of attributes."""

    __slots__ = ("kept",)

    def __init__(self) -> None:
        self.kept: list[dict[str, Tensor]] = [{}, {}]

    @property
    def start(self) -> int:
        return self.kept[0]["key"].shape[2] if self.kept[0] else 0

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        old = self.kept[layer]
        if old:
            key, value = torch.cat([old["key"], key], 2), torch.cat([old["value"], value], 2)
        self.kept[layer] = {"key": key, "value": value}
        return key, value


class Flat(Nested):
    """Keys and values before they are split into heads, (B, T, C)."""

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        flat = tuple(each.transpose(1, 2).flatten(2) for each in (key, value))
        if layer in self.layers:
            flat = tuple(torch.cat(pair, 1) for pair in zip(self.layers[layer], flat, strict=True))
        self.layers[layer] = flat
        key, value = (each.unflatten(2, (HEADS, -1)).transpose(1, 2) for each in flat)
        return key, value

    @property
    def start(self) -> int:
        return self.layers[0][0].shape[1] if self.layers else 0


class Modules(nn.Module):
    """A module that the model is given, with one for each layer, which holds its slots."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Room() for _ in range(2))
        self.start = 0

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        end = self.start + key.shape[2]
        key, value = (slots[:, :, :end] for slots in self.layers[layer].filled(key, value, self.start))
        self.start = end if layer else self.start
        return key, value


class Whole(Nested):
    """One tensor for all layers, in which each writes its new slots."""

    def __init__(self) -> None:
        self.slots, self.start = torch.zeros(2, 2, 2, HEADS, ROOM, WIDTH // HEADS), 0

    start = 0

    def grown(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        first, end = self.start, self.start + key.shape[2]
        self.slots[layer, 0, :, :, first:end], self.slots[layer, 1, :, :, first:end] = key, value
        self.start = end if layer else first
        return self.slots[layer, 0, :, :, :end], self.slots[layer, 1, :, :, :end]


class Room(nn.Module):
    """Slots that are filled one after another, in a module of their own, as in gpt-fast."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("keys", "values"):
            self.register_buffer(name, torch.zeros(2, HEADS, ROOM, WIDTH // HEADS), persistent=False)

    def filled(self, key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(start, start + key.shape[2])
        return self.keys.index_copy_(2, at, key), self.values.index_copy_(2, at, value)


class Attention(nn.Module):
    def __init__(self, by_hand: bool, room: bool) -> None:
        super().__init__()
        self.qkv, self.out_proj, self.n_head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), HEADS
        self.by_hand, self.room = by_hand, Room() if room else None

    def forward(self, x: Tensor, store: Any, layer: int, start: int) -> Tensor:
        query, key, value = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, 2))
        if self.room is not None:
            key, value = self.room.filled(key, value, start)
        elif store is not None:
            key, value = store.grown(layer, key, value)
        seen = torch.arange(key.shape[2]) <= torch.arange(start, start + x.shape[1])[:, None]
        return self.out_proj(attended(query, key, value, seen, self.by_hand))  # type: ignore[no-any-return]


def attended(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, by_hand: bool) -> Tensor:
    if by_hand:
        logits = query @ key.mT / (WIDTH // HEADS) ** 0.5
        rows = logits.masked_fill(~seen, -torch.inf).softmax(-1) @ value
    else:
        rows = functional.scaled_dot_product_attention(query, key, value, seen)
    return rows.transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Two layers. `places`: whether a token knows its position."""

    def __init__(self, by_hand: bool = False, room: bool = False, places: bool = True) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(torch.randn(1, ROOM, WIDTH) * places)
        self.layers = nn.ModuleList(Attention(by_hand, room) for _ in range(2))

    def forward(self, ids: Tensor, store: Any = None, start: int | None = None) -> Tensor:
        start = start if start is not None else 0 if store is None else store.start
        x = self.tokens(ids) + self.places[:, start : start + ids.shape[1]]
        for number, layer in enumerate(self.layers):
            x = x + layer(x, store, number, start)
        return x  # type: ignore[no-any-return]


def model_of(*args: Any, kind: Any = Model, **options: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return kind(*args, **options).eval()


def ids_of(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def in_one_pass(model: nn.Module, *inputs: Any) -> Any:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for given in inputs:
            model(*given if isinstance(given, tuple) else (given,))
    assert not seen.left_out
    return seen.run()


def in_steps(model: nn.Module, ids: Tensor, store: Any, sizes: list[int] = SIZES) -> None:
    for piece in ids.split(sizes, 1):
        model(piece, store)


@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
@pytest.mark.parametrize("store", slow_but([Nested, Slots, Flat, Modules, Whole], Nested, Slots, Modules))
def test_a_cache_is_found_wherever_it_is_kept(store: Any, by_hand: bool) -> None:
    model, texts = model_of(by_hand), [ids_of(2, 20), ids_of(2, 20, 2)]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for ids in texts:
            in_steps(model, ids, store())
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, *texts), atol=2e-5)


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
def test_slots_in_a_module_of_their_own_are_followed(by_hand: bool, named: bool) -> None:
    """Also where the module does not name its heads: queries and keys differ in number, but are in causal order."""
    model, alone, ids = model_of(by_hand, room=True), model_of(by_hand), ids_of(2, 20)
    for layer in (*model.layers, *alone.layers) if not named else ():
        del layer.n_head
    alone.load_state_dict(model.state_dict())
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for start, piece in zip([0, 9, 10, 11], ids.split([9, 1, 1, 9], 1), strict=True):
            model(piece, None, start)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(alone, ids), atol=2e-5)


@pytest.mark.parametrize("by_hand", [False, True])
@pytest.mark.parametrize(("sizes", "lines"), [([4, 7], 1), ([1, 1, 9], 2)])
def test_slots_that_nobody_watched_are_told(sizes: list[int], lines: int, by_hand: bool) -> None:
    """Their steps stood as sequences of cross-attention, or were left out without a word."""
    model, ids = model_of(by_hand, room=True), ids_of(2, 20)
    with torch.no_grad():
        model(ids[:, :9], None, 0)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        start = 9
        for piece in ids[:, 9:].split(sizes, 1):
            model(piece, None, start)
            start += piece.shape[1]
    assert len(seen.left_out) == lines
    assert all("keys in the model's own cache that the last pass did not leave there" in line for line in seen.left_out)
    with pytest.raises(sinkscope.SinkscopeError, match="nothing was measured"):
        seen.run()


def test_a_table_of_positions_is_no_cache() -> None:
    """A model without a cache would otherwise keep every pass until the next one."""
    model = model_of()
    model.register_buffer("table", torch.randn(1, ROOM, WIDTH))
    model.layers[0].register_buffer("mask", torch.ones(1, 1, WIDTH, WIDTH))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids_of(2, 20))
        assert seen.sequences == 2


@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
def test_a_batch_that_becomes_smaller_is_joined(by_hand: bool) -> None:
    model, ids, store = model_of(by_hand), ids_of(4, 14), Nested()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        in_steps(model, ids[:, :9], store, [8, 1])
        store.take(torch.tensor([0, 3]))
        in_steps(model, ids[[0, 3], 9:11], store, [1, 1])
        store.take(torch.tensor([1]))
        in_steps(model, ids[[3], 11:], store, [3])
    assert seen.left_out == ["a sequence that left its batch before the others ended was not read (3 times)"]
    assert_same(seen.run(), in_one_pass(model, ids[[3]]), atol=2e-5)


@pytest.mark.parametrize("by_hand", slow_but([False, True], False))
def test_a_batch_that_becomes_larger_is_joined(by_hand: bool) -> None:
    model, ids, store = model_of(by_hand), ids_of(3, 14), Nested()
    ids[:, :8] = ids[0, :8]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids[:1, :8], store)
        store.take(torch.tensor([0, 0, 0]))
        in_steps(model, ids[:, 8:], store, [1, 1, 4])
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, ids), atol=2e-5)


def test_tokens_taken_back_are_told_also_where_the_last_is_another_one_of_the_same() -> None:
    """The cache then ends as the last pass left it, but is shorter."""
    model, ids, store = model_of(places=False), ids_of(2, 14), Nested()
    ids[:, 7:10] = ids[:, 7:8]
    with torch.no_grad(), sinkscope.watch(model) as seen:
        in_steps(model, ids[:, :10], store, [8, 1, 1])
        store.crop(9)
        model(ids[:, 10:], store)
    assert seen.left_out == ["layers.0 attends to keys in the model's own cache that the last pass did not leave there"]
    assert_same(seen.run(), in_one_pass(model, ids[:, :10]), atol=2e-5)


def interrupted(model: Any, *given: Any) -> None:
    """A pass that Ctrl-C cuts off in its second layer."""

    def stop(module: nn.Module, args: Any) -> None:
        raise KeyboardInterrupt

    hook = model.layers[1].register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        model(*given)
    hook.remove()


def test_another_text_after_an_interruption_begins_anew() -> None:
    model, first, second, store = model_of(), ids_of(2, 9), ids_of(2, 20, 2), Nested()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(first, store)
        interrupted(model, first[:, :1], store)
        in_steps(model, second, Nested())
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, first, second), atol=2e-5)


def test_what_an_interrupted_pass_was_given_is_let_go() -> None:
    model, ids, store = model_of(), ids_of(2, 9), Nested()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        interrupted(model, ids, store)
    kept = weakref.ref(store)
    del store
    gc.collect()
    assert kept() is None
    assert not seen.sequences


@pytest.mark.parametrize("by_hand", [False, True])
def test_an_interrupted_step_is_made_again(by_hand: bool) -> None:
    model, ids, order = model_of(by_hand), ids_of(3, 12), torch.tensor([2, 0, 0])
    with torch.no_grad(), sinkscope.watch(model) as seen:
        store = Nested()
        model(ids[:, :9], store)
        store.take(order)
        kept = {**store.layers}
        interrupted(model, ids[:, 9:10], store)
        store.layers = kept
        in_steps(model, ids[:, 9:], store, [1, 2])
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, torch.cat([ids[order, :9], ids[:, 9:]], 1)), atol=2e-5)


class Reading(nn.Module):
    """Attention to another text, whose keys are computed once."""

    def __init__(self, by_hand: bool) -> None:
        super().__init__()
        self.query, self.both, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(32, 32)
        self.n_head, self.by_hand = HEADS, by_hand

    def forward(self, x: Tensor, memory: Tensor, kept: dict[str, Any] | None) -> Tensor:
        key, value = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.both(memory).chunk(2, 2))
        if kept is not None:
            key, value = kept.setdefault("memory", (key, value))
        query = self.query(x).unflatten(2, (HEADS, -1)).transpose(1, 2)
        seen = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool)
        return self.out_proj(attended(query, key, value, seen, self.by_hand))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """A layer of self-attention over a cache, and one of cross-attention. `named`: its name tells it."""

    def __init__(self, by_hand: bool, named: bool) -> None:
        super().__init__()
        self.name = "cross_attn" if named else "lookup"
        self.own = Model(by_hand)
        self.add_module(self.name, Reading(by_hand))

    def forward(self, ids: Tensor, memory: Tensor, store: Any = None, kept: dict[str, Any] | None = None) -> Tensor:
        return self.get_submodule(self.name)(self.own(ids, store), memory, kept)  # type: ignore[no-any-return]


@pytest.mark.parametrize("by_hand", slow_but([False, True], True))
@pytest.mark.parametrize(("named", "sizes"), [(False, [9, 1, 1, 4]), (True, [9, 1, 5]), (True, [1] * 15)])
def test_cross_attention_beside_a_cache_is_read(named: bool, sizes: list[int], by_hand: bool) -> None:
    model, ids = model_of(by_hand, named, kind=Decoder), ids_of(2, 15)
    memory = torch.randn(2, 12, WIDTH, generator=torch.Generator().manual_seed(3))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        store, kept = Nested(), dict[str, Any]()
        for piece in ids.split(sizes, 1):
            model(piece, memory, store, kept)
    assert not seen.left_out
    assert_same(seen.run(), in_one_pass(model, (ids, memory)), atol=2e-5)
