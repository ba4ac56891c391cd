"""What is kept of one pass of a model that somebody else runs: its attention calls and the tensors around them.

Every tensor is detached, and kept by reference. Where something was written into it since, `unwritten` tells.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from sinkscope.capture.calls import AttentionCall, MaskReadings
from sinkscope.capture.growth import Growth
from sinkscope.capture.kept import Kept
from sinkscope.capture.kernels.map_walk import AttentionMap, MapRows
from sinkscope.capture.padded import KEYS, MASKS, OWN, TARGET, Padding, masks_given
from sinkscope.capture.sites import STREAM_INPUTS, call_name, shown_name
from sinkscope.capture.views import Cut
from sinkscope.errors import SinkscopeError

CACHES = ("cache", "past_key_values", "past_key_value", "cache_params")
"""What models call a cache that they are given or return: the first from transformers 5.24 on."""

POSITIONS = "position_ids"
TOLD = (*MASKS, *CACHES, POSITIONS)
"""What tells of the sequences of a pass, also where it is given without its name."""
NO_INPUT = ("mask", "labels", "position")
"""Parts of the names of tensors that a model is given beside its input."""

Record = TypeVar("Record", AttentionCall, AttentionMap)

ROWS = ("query", "key", "value", "output", "projected", "of_tokens")
"""The tensors of an attention call that belong to the rows of its pass."""


MapPart = tuple[slice, Cut | None, MapRows]
"""Rows of a batch, their cut and what was taken of their map: the whole batch (no cut), or one sequence of a padded
batch."""


@dataclass(frozen=True)
class Onward:
    """How a map goes on with the sequences of earlier passes: its cuts (None: no padding), and for each of its parts
    the queries before it."""

    cuts: list[Cut] | None
    befores: list[int]


@dataclass(eq=False)
class Around:
    """One call of a module that attended: what it was given and what it returned, of three axes, and the numbers of the
    attention calls inside it, `first` to before `past`.

    `read`: what the projections inside it read, before the first of these; `reader`: the layer that read it, where it
    is not what was given. `joint`: it was given a second text or picture beside. `sizes`: the shape of what it was
    given, of whatever axes; `several`: as in `parts.Given`. `last`: whether what it was given has channels on the last
    axis, as a layer inside shows that reads it; None = none does.
    """

    path: str
    first: int
    past: int
    given: Kept | None
    returned: Kept | None = None
    joint: bool = False
    last: bool | None = None
    read: Kept | None = None
    reader: str | None = None
    sizes: torch.Size | None = None
    several: bool = False


@dataclass(eq=False)
class Share:
    """What belongs to one request of a pass over several: its tokens, `start` to before `stop` of the row, after
    `before` ones. `pages`: stands for the cache of this request. `wanted`: whether it is measured."""

    pages: Any
    start: int
    stop: int
    before: int
    wanted: bool = False


@dataclass(eq=False)
class Heard:
    """One attention call of a pass.

    Attributes:
        module: path of the module that made it. number: how many calls that module had made in the pass before.
        path: how the call was read, as in Site.
        call: its tensors; None where only the model's own map was seen, of which `parts` were taken.
        query, key, value, output, of_tokens: as in AttentionMap; of a call that was heard, `of_tokens` is None.
        dropped: the output is that of attention after dropout.
        projection: path of the output projection; None where there is none.
        projected: what the projection read, in the shape of `output`.
        ends: where the keys of each request end in a pass over several, after a 0; else None.
        among: `place_of` the calls that the parts were cut beside, in a padded pass.
        time_first: the projection read it with time first.
        folded: sequences and heads came as one axis, and nothing showed yet that sequences come first in it.
        factors: of the output projection's weight when the call was made; None where the call is measured at once.
        of_torch: torch's own attention made it, and applies its projection without a module's call.
        alone: the module returned what its projection returned.
        steered: the keyword with which the projection was given more than the heads, such as `adapter_names`, so that
            it need not do the same to every token; `projection` is None then.
    """

    module: str
    number: int
    path: str
    call: AttentionCall | None
    parts: list[MapPart] | None
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    output: Tensor | None
    rows: int
    heads: int
    queries: int
    keys: int
    dropped: bool = False
    projection: str | None = None
    projected: Tensor | None = None
    versions: tuple[Kept, ...] = ()
    ends: list[int] | None = None
    among: frozenset[str] = frozenset()
    folded: bool = False
    time_first: bool = False
    factors: Tensor | None = None
    of_torch: bool = False
    alone: bool = False
    of_tokens: Tensor | None = None
    steered: str | None = None

    @cached_property
    def name(self) -> str:
        """As the site will be called."""
        return call_name(self.module, self.number)

    @property
    def shown(self) -> str:
        """The name in a sentence."""
        return shown_name(self.name)

    def let_go(self) -> None:
        """Keeps no tensor of its rows any more."""
        for name in ROWS:
            setattr(self, name, None)

    @property
    def changed(self) -> bool:
        """Whether something was written into the tensors since."""
        return any(kept.unwritten is None for kept in self.versions)

    def has_room(self, masks: MaskReadings) -> bool:
        """Whether the keys are slots of a cache, of which the tokens of the pass fill the first, and no query sees the
        others. The last of these tokens is seen, or the order is causal: keys of another text have neither."""
        if self.keys <= self.queries:
            return False
        if self.call is not None:
            ends = masks.read(self.call).visible.reach[3].cpu()
            return int(ends.max()) == self.queries or torch.equal(ends, torch.arange(1, self.queries + 1))
        seen = [rows.seen_by[..., rows.queries - 1 :].amax((0, 1)) > 0 for _, _, rows in self.parts or ()]
        return all(bool(slots[0]) and not bool(slots[1:].any()) for slots in seen)


@dataclass(eq=False)
class Pass:
    """One forward pass: a call of the model, or of a part of it, that no other of its modules made.

    Attributes:
        root: path of the module that was called.
        signals: pictures or recordings that were given; None where there are none.
        batch: sequences; None where the inputs do not tell. second: the next axis of the input, which holds the
            sequences where time comes first.
        ids: the token ids that were given, [B, T].
        given: what else was given, as `given_digests`; None where the ids tell all.
        masks: the padding masks that were given, as `masks_given`.
        texts: where a packed row's position_ids begin anew, as `_later_texts`; None where they do not.
        decodes: whether the ids, or what stands for them, are a decoder's, whose encoder ran in another pass.
        cache: transformers' cache that was given, or that came back. before: the tokens it held when the pass began.
        padding: what the masks say, for the maps that are read at once.
        unmatched, split: as in InlineWatch.
        over_cache: the name and the queries of a call that has more keys and whose map was not kept; None = no such.
        refused: why the pass cannot be read; None where it can.
        counts: attention calls of each module so far.
        entered: paths of the modules that ran in it.
        pooled: how often modules attended from one position to several, in maps of their own, which were not kept.
        idle: where it is a step over a cache whose passes so far all attended through transformers' interface, the
            modules that ran in them without attention, which need no hook; else None.
        onward: takes the name of a call and the number of its keys, and says how its map goes on (None where no earlier
            pass made the call); itself None in the first pass.
        resumes: takes the name of a call, its keys and values, the number of its queries and a function that gives the
            key after the last one that any of them sees. It finds out whether the pass goes on over a cache that the
            model keeps itself, and sets `cache` then. None where no such sequence is open.
        keeps: finds out whether a later pass may go on with this one in such a way.
        asked: it is heard for this question alone, and not measured.
        shares: the requests of a continuous batch, in the order of their tokens; None where it is no such pass.
        changes: how often modules of the model had come, gone or changed places.
        growths: how layers of caches grew in it, by the ids of the keys that they gave back.
    """

    root: str
    batch: int | None = None
    second: int | None = None
    ids: Tensor | None = None
    given: list[bytes] | None = None
    masks: dict[str, Tensor] = field(default_factory=dict)
    texts: Tensor | None = None
    decodes: bool = False
    cache: Any = None
    before: int = 0
    heard: list[Heard] = field(default_factory=list)
    around: list[Around] = field(default_factory=list)
    unmatched: set[str] = field(default_factory=set)
    split: set[str] = field(default_factory=set)
    over_cache: tuple[str, int] | None = None
    refused: str | None = None
    padding: Padding = field(default_factory=Padding)
    counts: Counter[str] = field(default_factory=Counter)
    entered: set[str] = field(default_factory=set)
    pooled: Counter[str] = field(default_factory=Counter)
    idle: frozenset[str] | None = None
    onward: Callable[[str, int], Onward | None] | None = None
    resumes: Callable[[str, Tensor, Tensor, int, Callable[[], int]], None] | None = None
    keeps: Callable[[], bool] | None = None
    asked: bool = False
    shares: list[Share] | None = None
    changes: int = 0
    signals: int | None = None
    growths: dict[int, Growth] = field(default_factory=dict)

    @property
    def grown(self) -> dict[int, Growth]:
        """How the layers of its own cache grew."""
        layers = getattr(self.cache, "layers", ())
        layers = {id(layer) for layer in layers} if isinstance(layers, list | tuple) else set[int]()
        return {key: growth for key, growth in self.growths.items() if growth.layer in layers}

    def let_go(self) -> None:
        """Keeps no tensor of its attention calls any more, nor of the residual stream."""
        for heard in self.heard:
            heard.let_go()
        for around in self.around:
            around.given = around.read = around.returned = None
        self.growths.clear()

    @property
    def masks_of_tokens(self) -> dict[str, Tensor]:
        """The padding masks without one that is longer than the ids that it tells of: it covers a static cache, and
        the attention shows which of its places are padding."""
        side, ids = TARGET if self.decodes else OWN, self.ids
        if self.cache is None or ids is None:
            return self.masks
        return {name: mask for name, mask in self.masks.items() if name != side or mask.shape[1] <= ids.shape[1]}

    @property
    def places(self) -> set[str]:
        """`place_of` the calls that are known to belong to it before they are heard: a decoder's masks are not those
        of the encoder, which it reads."""
        return {"encoder", "cross"} if self.decodes else set()

    @property
    def hidden_shapes(self) -> dict[str, torch.Size]:
        """Shape of the hidden states that each attending module was given, by its calls' names; without those of joint
        attention, whose queries are more."""
        return {self.heard[number].name: sizes for number, sizes in self._own_sizes()}

    @property
    def padded_windows(self) -> set[str]:
        """The calls with more positions than the picture that a module around was given, [B, H, W, D]: it was padded to
        whole windows. By their names."""
        own = {self.heard[number].name: shape[-1] for number, shape in self._own_sizes()}
        found = set[str]()
        for around in self.around:
            for heard in self.heard[around.first : around.past]:
                picture = around.sizes if around.sizes is not None and len(around.sizes) == 4 else None
                if picture is not None and heard.module != around.path and own.get(heard.name) == picture[3]:
                    found |= {heard.name} if heard.queries == heard.keys > picture[1] * picture[2] else set()
        return found

    def _own_sizes(self) -> Iterator[tuple[int, torch.Size]]:
        """The number of each call whose module was given hidden states alone, and their shape."""
        for around in self.around:
            if around.sizes is not None and len(around.sizes) in (3, 4) and not around.joint:
                for number in range(around.first, around.past):
                    if self.heard[number].module == around.path:
                        yield number, around.sizes

    @property
    def several(self) -> set[str]:
        """The calls whose modules were given several hidden states, by their names."""
        return {
            self.heard[number].name
            for around in self.around
            if around.several
            for number in range(around.first, around.past)
            if self.heard[number].module == around.path
        }


def not_followed(name: str, queries: int) -> str:
    """Why a call with more keys than queries is left out, where nothing says whose keys they are."""
    who, cache = shown_name(name), "keys in the model's own cache that the last pass did not leave there"
    if queries == 1:
        return f"{who} attends from one position alone: pooling, which is not read, or {cache}"
    return f"{who} attends to {cache}"


def detached(record: Record) -> Record:
    """The record of a call with its tensors detached; itself where no gradient flows."""
    values = vars(record)
    grows = [name for name, value in values.items() if isinstance(value, Tensor) and value.requires_grad]
    changes: dict[str, Any] = {name: values[name].detach() for name in grows}
    return replace(record, **changes) if changes else record


def pass_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Pass:
    """What a call of the module at `name` tells of the pass that it begins. Raises SinkscopeError for nested input."""
    now = Pass(name)
    for argument in args:  # sentence-transformers hands its features over as one dict
        if isinstance(argument, Mapping):
            kwargs = {name: value for name, value in argument.items() if isinstance(name, str)} | kwargs
    named = (value for name, value in kwargs.items() if not any(part in name for part in NO_INPUT))
    first = next((value for value in (*args, *named) if isinstance(value, Tensor)), None)
    now.decodes = kwargs.get("encoder_outputs") is not None and kwargs.get("input_ids") is None
    given = args[0] if args and isinstance(args[0], Tensor) else first
    ids, vectors = ("decoder_input_ids", "decoder_inputs_embeds") if now.decodes else ("input_ids", "inputs_embeds")
    inputs = next((kwargs[name] for name in (ids, vectors) if isinstance(kwargs.get(name), Tensor)), given)
    if isinstance(inputs, Tensor) and inputs.dim() == 2 and not inputs.is_floating_point():
        now.ids = inputs.detach()
    main = inputs if isinstance(inputs, Tensor) else first
    if isinstance(main, Tensor) and main.is_nested:
        raise SinkscopeError("nested tensors are not read: give padded ones, and a mask")
    if isinstance(main, Tensor) and main.is_meta:
        raise SinkscopeError("tensors on the meta device hold no numbers")
    now.batch = main.shape[0] if isinstance(main, Tensor) and main.dim() > 1 else None
    now.second = main.shape[1] if isinstance(main, Tensor) and main.dim() in (2, 3) else None
    apart = isinstance(kwargs.get(KEYS), Tensor) and len(args) > 1 and not _same(args[0], args[1])
    now.masks = masks_given(kwargs, now.batch, now.second, apart)
    now.texts = _later_texts(kwargs.get(POSITIONS))
    signals = (kwargs[name] for name in STREAM_INPUTS if isinstance(kwargs.get(name), Tensor))
    now.signals = next((len(signal) for signal in signals if signal.dim()), None)
    now.cache = cache_given(kwargs)
    now.before = 0 if now.cache is None else _positions_in(now.cache)
    return now


def _positions_in(cache: Any) -> int:
    """The positions whose keys a cache holds; 0 for one of a model without attention (Mamba), which raises."""
    try:
        return int(cache.get_seq_length())
    except ValueError:
        return 0


def _later_texts(positions: Any) -> Tensor | None:
    """(B | 1, T): where another text than the first begins in a packed row, whose position_ids count from 0 again after
    a text whose own did. None where no row is packed so."""
    if not isinstance(positions, Tensor) or positions.dim() != 2 or positions.shape[1] < 2 or positions.is_meta:
        return None
    begins, last = positions[:, 1:] == 0, positions[:, :-1].long()
    first = torch.arange(last.shape[1], device=last.device) - last  # where the text before began
    counted = (first >= 0) & (positions.gather(1, first.clamp(min=0)) == 0)
    later = torch.nn.functional.pad(begins & (last > 0) & counted, (1, 0))
    return later if bool(later.any()) else None


def _same(first: Any, second: Any) -> bool:
    """Whether two inputs are one: queries and keys of one sequence, whose mask tells of both."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor) or first.shape != second.shape:
        return False
    return first.data_ptr() == second.data_ptr() or torch.equal(first, second)


def cache_given(kwargs: Mapping[str, Any]) -> Any:
    """The cache that a model is called with; None where it gets none."""
    return next((cache for name in CACHES if (cache := _cache_in(kwargs.get(name))) is not None), None)


def _cache_in(given: Any) -> Any:
    """A cache that a model is given or returns; None where it is none. Of a pair, the one of self-attention: a model
    may put the cache that it is given into a new pair in each pass (BLIP's text decoder)."""
    inner = getattr(given, "self_attention_cache", None)
    return next((cache for cache in (inner, given) if hasattr(cache, "get_seq_length")), None)


def cache_returned(output: Any) -> Any:
    """The cache that a model returns; None where it returns none. transformers warns of outputs' old names, so only
    names that an output holds are read."""
    names = set(output.keys()) if isinstance(output, Mapping) else CACHES
    values = (getattr(output, name, None) for name in CACHES if name in names)
    return next((cache for value in values if (cache := _cache_in(value)) is not None), None)


def for_few_tokens(heard: list[Heard]) -> frozenset[str]:
    """The modules that ran for some tokens of a text alone, over the very keys with which another module attended from
    more of them.

    Gemma 4's last layers, which share the keys of earlier ones, run for the tokens whose logits are asked for.
    """
    owners, found = dict[tuple[object, ...], Heard](), set[str]()
    for each in heard:
        if each.call is not None:
            key = each.call.key
            owner = owners.setdefault((key.data_ptr(), tuple(key.shape), key.stride()), each)
            if each.module != owner.module and each.queries < owner.queries:
                found.add(each.module)
    return frozenset(found)
