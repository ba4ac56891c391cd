"""Tells whole maps of a sequence's queries and keys from calls that make parts of one, or maps of channels."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sinkscope.capture.axes import given_several, hidden_given
from sinkscope.capture.hooks import hooked
from sinkscope.capture.sites import call_name, stream_of


@dataclass(frozen=True)
class Seen:
    """One attention call of a pass. `heads` and the fields after it are as in Site. `projects`: tells the output
    projection of a call in a model's own code from the one that a name tells; None leaves it at the name. `alone`:
    whether the module is known to return what its projection returns. `number`: how many calls the module had made;
    None = as many as stand before this one. `steered`: as in Heard."""

    module: str
    rows: int
    queries: int
    keys: int
    heads: int
    kv_groups: int
    head_dim: int | None
    value_dim: int | None
    causal: bool
    path: str
    window: int | None = None
    score: str = "softmax"
    kernel: str | None = None
    projects: Callable[[str | None], str | None] | None = None
    alone: Callable[[], bool] = bool
    number: int | None = None
    steered: Callable[[str | None], str | None] = lambda path: None


@dataclass
class Given:
    """What a pass was given: `rows` sequences of `length` positions (None where the input does not tell), and the
    modules hidden states of these `shapes`, of three axes or of four (pictures), by the name of a call of the module.
    `several`: calls that were given other tensors beside. `padded`: those over a picture that was padded to windows.
    `calls`: how often each module was called."""

    rows: int = 1
    length: int | None = None
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    several: set[str] = field(default_factory=set)
    padded: set[str] = field(default_factory=set)
    calls: Counter[str] = field(default_factory=Counter)


def no_maps(model: nn.Module, calls: Mapping[str, Seen], unmatched: set[str], given: Given) -> set[str]:
    """Paths of modules whose calls are only parts of an attention map, or no attention.

    `calls`: by their names. `unmatched`: modules with a softmax whose product with values was not seen.
    """
    counts = Counter(call.module for call in calls.values())
    chunked = _in_chunks(calls.values(), given.length)

    def part(call: Seen, name: str) -> bool:
        square = call.queries == call.keys
        of_image = stream_of(model, call.module, False) == "vision"
        alone = name in given.shapes and name not in given.several
        return (
            (call.module in unmatched and not square)  # banded attention with global tokens
            or call.rows != given.rows  # windows folded into the batch: several rows for one sequence
            or (of_image and counts[call.module] > 1)  # windows: one call for each, their number depends on the image
            or (of_image and not square and name not in given.several)  # pooled keys
            or (alone and not square and _pools(call, given.shapes[name]))
            or call.module in chunked
            or name in given.padded
            or of_part((call.rows, call.queries, call.keys), given.shapes.get(name), given.length, call.heads)
            or _reads_windowed_cache(model, call)
        )

    return {call.module for name, call in calls.items() if part(call, name)}


def _pools(call: Seen, given: torch.Size) -> bool:
    """Whether a module attends to fewer keys than the positions of what it was given, and not from more queries."""
    return any(call.keys < count >= call.queries for count in positions_of(given, call.rows))


def _in_chunks(calls: Iterable[Seen], length: int | None) -> set[str]:
    """Modules that attend chunk by chunk, in a call for each: all are of one size, but for a shorter last one, and
    together they have the positions of the sequence (CANINE)."""
    sizes = defaultdict[str, list[tuple[int, int]]](list)
    for call in calls:
        sizes[call.module].append((call.queries, call.keys))
    return {
        module
        for module, own in sizes.items()
        if len(own) > 1
        and all(queries == keys for queries, keys in own)
        and {*own[:-1]} == {own[0]}
        and own[-1] <= own[0]
        and sum(queries for queries, _ in own) == length
    }


def positions_of(given: torch.Size, rows: int) -> tuple[int, ...]:
    """How many positions hidden states of a shape may have: (B, T, D) or (T, B, D), (B, H, W, D) or (B, D, H, W)."""
    if len(given) == 4:
        return given[1] * given[2], given[2] * given[3]
    return tuple(size for other, size in ((given[0], given[1]), (given[1], given[0])) if other == rows)


def of_part(call: tuple[int, int, int], given: torch.Size | None, length: int | None, heads: int | None = None) -> bool:
    """Whether a module that gets (B, T, D) attends from fewer than T positions to as many, in a window or among
    channels, or pads its positions to a whole window of more. `call`: numbers of rows, queries and keys. `length`:
    positions of a whole sequence; a module may get several streams of them. So does one that gets a picture, of four
    axes, unless these are its queries, of so many `heads`.

    False where it gets channels first (B, D, T) or positions first (T, B, D): these sizes do not show it.
    """
    rows, queries, keys = call
    if given is not None and len(given) == 4:
        own = (*positions_of(given, rows), length, given[2] if given[1] == heads else None)
        return queries == keys and queries not in own
    if given is None or queries != keys or queries in (given[2], length) or tuple(given[:2]) == (queries, rows):
        return False
    return given[1] not in (1, queries)


@dataclass(frozen=True, eq=False)
class Keys:
    """The keys (B, G, Tk, d) and values of one call, without learned ones that belong to no token; None where they were
    not seen, or have no numbers. `onward`: its queries are the last of more keys, in causal order."""

    module: str
    queries: int
    key: Tensor | None
    onward: bool = False
    value: Tensor | None = None


def in_pieces(calls: Iterable[Keys], alone: Mapping[str, int]) -> set[str]:
    """Modules that compute the rows of one map in several calls: the queries of all are as many as the keys of the
    longest, and each other one has the first of these keys. `alone`: calls of one query that were not kept."""
    pieces = defaultdict[str, list[Keys]](list)
    for call in calls:
        pieces[call.module].append(call)
    return {module for module, own in pieces.items() if len(own) > 1 and _one_map(own, alone.get(module, 0))}


def _one_map(pieces: list[Keys], alone: int) -> bool:
    keys = [piece.key for piece in pieces if piece.key is not None]
    longest = max(keys, key=lambda key: key.shape[2], default=None)
    if longest is None or len(keys) < len(pieces):
        return False
    queries = sum(piece.queries for piece in pieces)
    if longest.shape[2] not in (queries, queries + alone):
        return False
    return all(torch.equal(key, longest[:, :, : key.shape[2]]) for key in keys)


def keeps_keys(calls: Iterable[Keys], before: Iterable[Keys]) -> str | None:
    """The first module whose calls begin with the last keys of the pass before: it keeps them, in a cache of its own.
    None where none does."""
    for call, earlier in zip(calls, before, strict=False):
        if call.onward and call.key is not None and earlier.key is not None and call.module == earlier.module:
            past = min(call.key.shape[2] - call.queries, earlier.key.shape[2])
            if torch.equal(call.key[:, :, : -call.queries][:, :, -past:], earlier.key[:, :, -past:]):
                return call.module
    return None


def goes_on(probabilities: Tensor) -> bool:
    """Whether the queries of a map are the last of more keys, in causal order; slots may stand empty behind these."""
    if probabilities.is_meta or probabilities.shape[-1] <= probabilities.shape[-2]:
        return False
    first = end_of_map(probabilities[..., :1, :])
    return first > 1 and counts_up(probabilities, first)


def counts_up(probabilities: Tensor, first: int) -> bool:
    """Whether the first query sees the keys up to so many, and each later one a key more than the one before."""
    queries, keys = probabilities.shape[-2:]
    seen = (probabilities != 0).flatten(0, -3).any(0)
    ends = (keys - seen.flip(-1).int().argmax(-1)).cpu()
    return torch.equal(ends, torch.arange(first, first + queries))


def end_of_map(probabilities: Tensor) -> int:
    """The key after the last one that any query of a map sees."""
    seen = (probabilities != 0).flatten(0, -2).any(0)
    return int(seen.nonzero().max()) + 1 if bool(seen.any()) else 0


@contextmanager
def hidden_states(model: nn.Module) -> Iterator[Given]:
    """Collects what the model and its modules are given in a pass over one sequence."""
    found = Given()

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        first = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        found.length = first.shape[1] if first is not None and first.dim() in (2, 3) else None

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = hidden_given(args, kwargs)
            if isinstance(hidden, Tensor) and hidden.dim() in (3, 4):
                found.shapes[call_name(name, found.calls[name])] = hidden.shape
            if given_several(args, kwargs):
                found.several.add(call_name(name, found.calls[name]))
            found.calls[name] += 1

        return hook

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(hooked(module, pre=keep(name) if name else begin, with_kwargs=True))
        yield found


def _reads_windowed_cache(model: nn.Module, one: Seen) -> bool:
    """Whether a diffusion model's canvas reads its prompt from a sliding-window cache, whose first key may not be the
    sequence's first position."""
    return (
        one.window is not None and one.queries != one.keys and hasattr(getattr(model, "config", None), "canvas_length")
    )
