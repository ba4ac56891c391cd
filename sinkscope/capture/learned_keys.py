"""Keys and values that a model has learned, and puts beside those of its tokens: memory, null or bias keys, or zeros.

Such a key belongs to no token, so what it takes of a query's attention is what a learned sink logit takes: its logits
become `sinks` of the call, which goes on with the tokens' keys alone. Where its value is not 0, the model's output
holds a part that comes from no token. `added_output` gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.capture.kernels.sums import AttentionSums
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.masks.visibility import strip
from sinkscope.capture.parts import Keys, end_of_map
from sinkscope.capture.sites import shown_name, stream_of
from sinkscope.errors import SinkscopeError

Record = TypeVar("Record", AttentionCall, AttentionMap)


@dataclass(frozen=True)
class Places:
    """How many learned keys stand before those of the tokens, and how many behind them."""

    before: int = 0
    behind: int = 0

    @property
    def count(self) -> int:
        """How many they are."""
        return self.before + self.behind

    def ends(self, keys: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """The places before the tokens' keys and those behind them, each first and past, of so many keys in all."""
        return (0, self.before), (keys - self.behind, keys)

    def tokens(self, keys: int) -> slice:
        """The places of the tokens' keys."""
        return slice(self.before, keys - self.behind)

    def own(self, tensor: Tensor, keys: int, axis: int = -1) -> Tensor:
        """The learned keys' part of a tensor along an axis of so many keys."""
        return torch.cat([tensor.narrow(axis, first, past - first) for first, past in self.ends(keys)], axis)


NOWHERE = Places()


class LearnedKeys:
    """Finds out which modules of `model` put learned keys beside those of their tokens, and takes them out.

    `known`: places that something else than a call has told, by a module's path. `found` has those of every module that
    was asked about.
    """

    def __init__(self, model: nn.Module, known: Mapping[str, Places] | None = None) -> None:
        self._model, self._known = model, known or {}
        self._without: set[str] = set()
        self._empty: dict[str, set[int]] = {}
        self.found: dict[str, Places] = {}

    def without(self, path: str, record: Record) -> Record:
        """The record of a call in the module at `path`, over the tokens' keys alone; itself where there are no others.

        Raises SinkscopeError where learned keys cannot be told from those of tokens.
        """
        places = self._places(path, record)
        self.found[path] = places
        return record if places.count == 0 else without(path, record, places)

    def _places(self, path: str, record: AttentionCall | AttentionMap) -> Places:
        if path in self._without:
            return NOWHERE
        module = self._model.get_submodule(path)
        if isinstance(module, nn.MultiheadAttention):
            if (places := _of_torch(path, module, record)).count:
                self._check_fused(path)
            return places
        if path in self._known:
            return self._known[path]
        if not self._may(path, record):
            return Places()
        places = self._seen(path, record)
        if places.count == 0:  # the first call that may have some tells it of all
            if not self._reads_another(path) and _shares_others(record):
                why = "all sequences share them, and none is a parameter; scan the model instead"
                raise SinkscopeError(not_read(path, why))
            self._without.add(path)
        return places

    def _check_fused(self, path: str) -> None:
        """Raises SinkscopeError where torch would compute a layer without them, if it were not watched."""
        layer = self._model.get_submodule(path.rpartition(".")[0]) if path else None
        if isinstance(layer, nn.TransformerEncoderLayer) and not layer.training:
            raise SinkscopeError(not_read(path, "torch's fused path of an encoder layer in eval mode leaves them out"))

    def _may(self, path: str, record: AttentionCall | AttentionMap) -> bool:
        """Whether a call has other keys than those of its queries."""
        queries, keys = record.lengths
        return queries != keys or self._reads_another(path)

    def _reads_another(self, path: str) -> bool:
        return stream_of(self._model, path, False) == "cross"

    def _seen(self, path: str, record: AttentionCall | AttentionMap) -> Places:
        """Where the first and last keys are parameters of the module at `path` or of one that holds it, by their keys
        or values, or where the first ones are zeros. None where all are."""
        key, value = record.key, record.value
        if key is None or value is None or key.is_meta or not bool(key.any()):
            return Places()  # keys of zeros alone are a text of zeros, as a diffusion model's empty prompt
        weights = [*_weights(self._model, path)]
        empty = set[int]()

        def learned(place: int) -> bool:
            return any(_holds(weight, tensor[0, 0, place]) for tensor in (key, value) for weight in weights)

        def zero(place: int) -> bool:
            if not bool(key[:, :, place].any()) and not bool(value[:, :, place].any()):
                empty.add(place)
            return place in empty

        queries, keys = record.lengths
        before = _count(lambda place: learned(place) or zero(place), range(keys))
        if before == keys:
            return Places()
        places = Places(before, _count(learned, range(keys - 1, before, -1)))
        if empty and queries == keys - places.count and not self._reads_another(path):
            self._empty[path] = empty  # more keys than tokens: later passes over a cache have them, too
        if empty and empty != self._empty.get(path):
            raise SinkscopeError(not_read(path, "its first keys are zeros, which may be learned, or stand for padding"))
        return places


def _count(holds: Callable[[int], bool], places: Iterable[int]) -> int:
    """How many of these places, from the first on, it holds for."""
    count = 0
    for place in places:
        if not holds(place):
            break
        count += 1
    return count


def _of_torch(path: str, module: nn.MultiheadAttention, record: AttentionCall | AttentionMap) -> Places:
    """Where torch's own module puts them: a learned key behind the tokens', and behind it one of zeros."""
    count = (module.bias_k is not None) + bool(module.add_zero_attn)
    key = record.key
    if count == 0 or key is None or key.is_meta:
        return Places(0, count)
    last, (queries, keys) = key[0, 0, -count:], record.lengths
    biased = module.bias_k is None or _is_in(module.bias_k, last[0])
    if biased and (not module.add_zero_attn or not bool(last[-1].any())):
        return Places(0, count)
    if queries != keys:
        raise SinkscopeError(not_read(path, "its last keys are not the learned ones that torch's own forward adds"))
    return Places()  # a forward of somebody's own leaves them out


def not_read(path: str, why: str) -> str:
    """What is said of a call with learned keys that are not read."""
    return f"{shown_name(path)} attends to learned keys (memory, null or bias keys) that are not read: {why}"


def _weights(model: nn.Module, path: str) -> Iterator[Tensor]:
    """The parameters of the modules from the one at `path` up to the model, without those of their other children."""
    parts = path.split(".") if path else []
    for depth in range(len(parts), -1, -1):
        yield from model.get_submodule(".".join(parts[:depth])).parameters(recurse=False)


def _holds(weight: Tensor, vector: Tensor) -> bool:
    """Whether a parameter holds the numbers of a vector, which are not all 0."""
    return bool(vector.any()) and _is_in(weight, vector)


def _is_in(weight: Tensor, vector: Tensor) -> bool:
    """Whether a parameter has the numbers of a vector, one after another at a multiple of its width."""
    if weight.is_meta or weight.device != vector.device or weight.numel() % vector.numel():
        return False
    rows = weight.detach().to(vector.dtype).reshape(-1, vector.numel())
    return bool((rows == vector).all(1).any())


def unchanged(calls: Iterable[Keys], before: Iterable[Keys]) -> dict[str, Places]:
    """Where calls have keys and values that are those of the pass before, though every token is another: the model made
    them of what it has learned. By the paths of the modules; empty where none has some.

    Raises SinkscopeError where they stand between those of tokens, or their values change.
    """
    found = dict[str, Places]()
    for call, earlier in zip(calls, before, strict=False):
        if call.key is None or earlier.key is None or call.module != earlier.module:
            continue
        if call.key.shape != earlier.key.shape or call.queries == call.key.shape[2]:
            continue
        same = _same(call.key, earlier.key)
        given = (call.key != 0).any(-1).flatten(0, 1).any(0)  # slots that stand empty hold zeros
        if not bool((same & given).any()) or bool(same.all()):
            continue
        found[call.module] = _at_ends(call, earlier, same & given)
    return found


def _shares_others(record: AttentionCall | AttentionMap) -> bool:
    """Whether several sequences have the same first or last keys and values, beside as many others as there are
    queries, and all queries see keys up to the same one: a cache's are in causal order."""
    (queries, keys), key, value = record.lengths, record.key, record.value
    if key is None or value is None or key.is_meta or len(key) < 2 or not 1 < queries < keys:
        return False
    told = (_same(key, key[:1]) & _same(value, value[:1])).tolist()
    if not _runs(told).count == sum(told) == keys - queries:
        return False
    if isinstance(record, AttentionCall):
        reach = record.visible.reach[3]
        return bool(reach[0] == reach[-1])
    return end_of_map(record.probabilities[..., :1, :]) == end_of_map(record.probabilities[..., -1:, :])


def _same(one: Tensor, other: Tensor) -> Tensor:
    """[Tk]: at which places two tensors of keys or values are the same in every head."""
    return (one == other).all(-1).flatten(0, 1).all(0)


def _runs(told: list[bool]) -> Places:
    """How many of these places it holds for without a gap, from either end."""
    return Places(*(_count(lambda at: told[at], places) for places in (range(len(told)), range(len(told) - 1, -1, -1))))


def _at_ends(call: Keys, earlier: Keys, same: Tensor) -> Places:
    told = same.tolist()
    places = _runs(told)
    if places.count != sum(told):
        raise SinkscopeError(not_read(call.module, "some stand between the keys of tokens"))
    if call.value is None or earlier.value is None or not bool(_same(call.value, earlier.value)[same].all()):
        raise SinkscopeError(not_read(call.module, "their values were not seen, or are not learned"))
    if call.queries != len(told) - places.count:
        raise SinkscopeError(not_read(call.module, "the others are not the keys of its queries"))
    return places


# Takes learned keys out of the record of a call: the one place that knows what they become.


def without(path: str, record: Record, places: Places) -> Record:
    """The record of a call over its tokens' keys alone, with the logits of the learned keys among its sinks.

    Raises SinkscopeError where the keys or values at these places are not the same in every sequence.
    """
    for tensor in (record.key, record.value):
        if tensor is not None and not tensor.is_meta:
            own = places.own(tensor, record.lengths[1], 2)
            if not _alike(own):
                raise SinkscopeError(not_read(path, "they are others in each sequence"))
    if isinstance(record, AttentionMap):
        return _map_without(record, places)
    if record.score != "softmax":
        raise SinkscopeError(not_read(path, f"its attention is {record.score}, no softmax"))
    return _call_without(record, places)


def _alike(own: Tensor) -> bool:
    """Whether keys or values are those of the first sequence in all, but for rounding: some models project them in one
    product with those of the tokens."""
    far = float((own - own[:1]).abs().max())
    return far == 0 or far <= 8 * torch.finfo(own.dtype).eps * float(own.abs().max())


def _call_without(call: AttentionCall, places: Places) -> AttentionCall:
    queries, keys = call.lengths
    tokens = places.tokens(keys)
    logits = _logits(call, places)
    if call.sinks is not None:
        others = call.sinks.to(logits.dtype).expand(len(logits), -1, queries, -1)
        logits = torch.cat([others, logits], -1)
    ordered = call.mask is None and call.causal  # torch counts the learned keys before the tokens', too
    return replace(
        call,
        key=call.key[:, :, tokens],
        value=call.value[:, :, tokens],
        mask=_later(call, places) if ordered and places.before else _part(call.mask, tokens),
        causal=call.causal and not places.before,
        bias=_part(call.bias, tokens),
        sinks=logits,
        learned=_values(call.value, places),
    )


def _part(mask: Tensor | None, tokens: slice) -> Tensor | None:
    return None if mask is None else mask[..., tokens]


def _later(call: AttentionCall, places: Places) -> Tensor:
    """The mask of the tokens' keys where learned ones stand before them and query i sees the first i + 1 of all."""
    device, (queries, keys) = call.query.device, call.lengths

    def part(start: int, stop: int, low: int, high: int) -> Tensor:
        rows = torch.arange(start, stop, device=device)[:, None]
        return (torch.arange(low, high, device=device) + places.before <= rows)[None, None]

    return made_in_strips(part, len(call.query), queries, keys - places.count)


def _logits(call: AttentionCall, places: Places) -> Tensor:
    """The logits of the learned keys, (B, H, Tq, n), in float32 (float64 for a float64 model); -inf where a query does
    not see one."""
    queries, keys = call.lengths
    dtype = torch.float64 if call.query.dtype == torch.float64 else torch.float32
    own = places.own(call.key, keys, 2).to(dtype)
    query = call.query.unflatten(1, (own.shape[1], -1)).to(dtype)
    logits = (query @ own.mT.unsqueeze(2)).flatten(1, 2) * call.scaling
    if call.softcap is not None:
        logits = (logits / call.softcap).tanh() * call.softcap
    if call.bias is not None:
        logits = logits + places.own(call.bias, keys).to(dtype)
    if call.mask is not None:
        ends = [strip(call.mask, 0, call.mask.shape[-2], first, past) for first, past in places.ends(keys)]
        mask = torch.cat(ends, -1)
        if mask.dtype == torch.bool:
            return logits.masked_fill(~mask, -torch.inf)
        return (logits + mask.to(dtype)).masked_fill(mask <= torch.finfo(mask.dtype).min / 2, -torch.inf)
    if call.causal:
        at = places.own(torch.arange(keys, device=logits.device), keys)
        logits = logits.masked_fill(at > torch.arange(queries, device=logits.device)[:, None], -torch.inf)
    return logits


def _values(value: Tensor, places: Places) -> Tensor | None:
    """(1, G, n, dv): the values of the learned keys; None where all are 0."""
    own = places.own(value, value.shape[2], 2)[:1]
    return own if own.is_meta or bool(own.any()) else None


def _map_without(seen: AttentionMap, places: Places) -> AttentionMap:
    keys = seen.lengths[1]
    tokens = places.tokens(keys)
    probabilities = seen.probabilities[..., tokens]
    logits = seen.logits
    if logits is not None:
        inside = logits[..., :keys]
        logits = torch.cat([inside[..., tokens], logits[..., keys:], places.own(inside, keys)], -1)
    key, value = (None if tensor is None else tensor[:, :, tokens] for tensor in (seen.key, seen.value))
    of_tokens = None
    if value is not None and seen.value is not None and _values(seen.value, places) is not None:
        repeated = value.repeat_interleave(probabilities.shape[1] // value.shape[1], 1)
        of_tokens = (probabilities @ repeated.to(probabilities.dtype)).transpose(1, 2)
    return replace(seen, probabilities=probabilities, logits=logits, key=key, value=value, of_tokens=of_tokens)


def added_output(call: AttentionCall, sums: AttentionSums) -> Tensor | None:
    """What learned keys add to the output of a call, (B, Tq, H, dv) in the dtype of `sums`; None where it is nothing.

    Their shares are those of their logits among the sinks, of what the sinks take.
    """
    if call.learned is None or call.sinks is None:
        return None
    count, heads = call.learned.shape[2], call.query.shape[1]
    shares = call.sinks.softmax(-1)[..., -count:].nan_to_num(0.0)  # a query that sees none of them has only -inf
    shares = (shares * sums.learned_sink.unsqueeze(-1)).to(sums.first.dtype)
    values = call.learned.to(shares.dtype).repeat_interleave(heads // call.learned.shape[1], 1)
    return (shares @ values).transpose(1, 2)
