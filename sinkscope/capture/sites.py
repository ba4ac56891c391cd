"""Site: one attention call of a model's forward pass, what its queries may see, and where in the model it is."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import nn


def call_name(module: str, number: int) -> str:
    """What the call of this number of a module is called in one pass: the module's path; path[n] after the first."""
    return module if number == 0 else f"{module}[{number}]"


def shown_name(call: str) -> str:
    """The name of a call or module in a sentence."""
    return call if call and not call.startswith("[") else f"the model itself{call}"


@dataclass(frozen=True)
class AttentionKind:
    """What a query of an attention call may see: `full`, `cross`, or some keys: `sliding`, `chunked`.

    `size` W of `sliding`: query i sees keys from i-W+1 on, up to i in causal attention and as far ahead where attention
    goes both ways. `size` of `chunked`: the keys in a chunk.

    As text, in the tables: `full`, `cross`, `sliding:512`, `chunked:8192`.
    """

    name: str
    size: int | None = None

    def __str__(self) -> str:
        return self.name if self.size is None else f"{self.name}:{self.size}"


@dataclass(frozen=True)
class Site:
    """One attention call of a model's forward pass, and its place in the model.

    Attributes:
        stream: `text`, `vision`, `audio`, `encoder`, `decoder` or `cross`.
        layer: the block's index in its ModuleList; a running number in the stream where there is no such list, or
            where two calls would have the same number.
        module: dotted path of the attention module.
        call: 0 for the module's first call in a pass, 1 for its second, and so on.
        kind: `full`, `sliding:W`, `chunked:C` or `cross`.
        head_dim, value_dim: widths of q and k, and of v; None where these were not seen.
        path: how the call is read: `interface` (through transformers' attention interface) or `inline` (computed by the
            model's own code).
        score: how logits become attention: `softmax`, or a name in `scores.SCORES`.
        kernel: what sums the attention: `triton` or `torch blocks`; None where the model's own map is summed.
        block, projection: paths of the block and of the output projection; None where there is none.
        steered: a keyword argument, given to the output projection beside the heads, for which it is not known what
            the projection does to each token; `projection` is None then.
    """

    stream: str
    layer: int
    module: str
    call: int
    kind: AttentionKind
    heads: int
    kv_groups: int
    head_dim: int | None
    value_dim: int | None
    causal: bool
    block: str | None
    projection: str | None
    path: str = "interface"
    score: str = "softmax"
    kernel: str | None = None
    steered: str | None = None

    @property
    def name(self) -> str:
        """The module's path; path[n] for its n-th call in one pass."""
        return call_name(self.module, self.call)

    @property
    def projects(self) -> bool:
        """Whether its place alone tells that the output projection reads the heads: it is a part of the module, or
        beside one of transformers' interface. Another one may read anything, such as the model's last states."""
        inside = self.path == "interface" or (self.projection or "").startswith(f"{self.module}.")
        return bool(self.module) and inside

    @property
    def cross(self) -> bool:
        """Whether queries attend to another sequence, which may be as long as their own."""
        return self.kind.name == "cross"


# Where a model's attention heads are: module path, block, layer number, stream and kind.
#
# Layer numbers come from the module tree, never from `layer_idx`, which several modules may share.


CROSS_NAMES = (
    "encoder_attn",
    "encdecattention",
    "crossattention",
    "cross_attn",
    "cross_attention",
    "src_attn",
    "enc_dec_attn",
    "crossattn",
)
HEAD_COUNTS = (
    "num_heads",
    "num_attention_heads",
    "n_heads",
    "n_head",
    "heads",
    "decoder_attention_heads",
    "encoder_attention_heads",
    "num_attn_heads",
    "num_decoder_attention_heads",
    "num_encoder_attention_heads",
)
STREAM_NAMES = {
    "vision": ("vision", "visual", "image", "vit"),
    "audio": ("audio", "speech"),
    "text": ("text", "language", "llm"),
}
"""The stream by a word of the module's path, or its beginning (`vision_tower`, `visual`)."""
WHOLE_WORDS = ("vit",)

STREAM_INPUTS = {"pixel_values": "vision", "input_features": "audio", "input_values": "audio"}
"""The stream by the model's main input, for modules whose path does not tell it."""

TEXT_INPUTS = ("input_ids", "inputs_embeds", "inputs")


def main_input(model: nn.Module) -> str:
    """The keyword of a model's main input; several, as OneFormer's, in one word.

    Where the forward of a class of transformers' own takes neither the keyword that the model names nor any text, it is
    the one that it takes first: most vision towers do not name theirs.
    """
    named = getattr(model, "main_input_name", "input_ids")
    if not isinstance(named, str):
        return " and ".join(named)
    taken = _taken(type(model).forward) if type(model).__module__.startswith("transformers.") else ()
    return named if not taken or any(name in taken for name in (named, *TEXT_INPUTS)) else taken[0]


@cache
def _taken(forward: Callable[..., Any]) -> tuple[str, ...]:
    _, *taken = inspect.signature(forward).parameters.values()
    return tuple(each.name for each in taken if each.kind is each.POSITIONAL_OR_KEYWORD)


def block_of(model: nn.Module, path: str, attention_paths: Iterable[str]) -> tuple[str, int] | None:
    """The block that holds an attention module: (path of the block, its place in its ModuleList).

    The block is a child of the innermost ModuleList whose children all hold attention, of such an nn.Sequential, or of
    such a ModuleDict by numbered names (`layer_0`). Where there is none (the layers of a hybrid model, T5's list of
    sub-layers), it is a child of the outermost ModuleList. A module in no ModuleList is in one of several numbered
    attributes (`block1`, `block2`) that all hold attention; None where there are none. Lists of branches come last.
    """
    paths = list(attention_paths)
    parts = path.split(".")
    branch = outermost = attribute = None
    for depth in range(len(parts) - 1, -1, -1):
        parent = ".".join(parts[:depth])
        holder = model.get_submodule(parent)
        row = _numbered(holder, parts[depth])
        if parts[depth] not in row:
            continue
        place = int(parts[depth]) if parts[depth].isdecimal() else row.index(parts[depth])
        block = ".".join(parts[: depth + 1]), place
        children = [f"{parent}.{name}".removeprefix(".") for name in row]
        if all(any(_under(p, child) and p != child for p in paths) for child in children):
            if is_list(holder) and not parent.endswith(BRANCHES):
                return block
            branch = branch or (block if is_list(holder) else None)
            attribute = attribute or block
        if isinstance(holder, nn.ModuleList):
            outermost = block
    return branch or outermost or attribute


def may_be_block(model: nn.Module, path: str) -> bool:
    """Whether `block_of` may give this path, whichever modules attend: the module stands in a row of numbered ones."""
    parent, _, name = path.rpartition(".")
    return bool(name) and name in _numbered(model.get_submodule(parent), name)


def is_torch_attention(model: nn.Module, path: str) -> bool:
    """Whether a module is torch's own attention, which applies its output projection itself."""
    return isinstance(model.get_submodule(path), nn.MultiheadAttention)


BRANCHES = (".attns", ".attentions")
"""Ends of the paths of lists whose members stand side by side, where the blocks around them are in a list too: those of
timm's parallel ViT."""


def is_list(module: nn.Module) -> bool:
    """Whether a module only holds others, one after another or by their names."""
    return isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)


def _numbered(holder: nn.Module, name: str) -> list[str]:
    """The names of the children that the one of this name is numbered with, in their order: all of a ModuleList or a
    Sequential, else those that differ in their number alone. Empty without a number, or where it stands alone."""
    names = [child for child, _ in holder.named_children()]
    stem = name.rstrip("0123456789")
    if isinstance(holder, nn.ModuleList):
        return names
    row = [child for child in names if child != stem and child.rstrip("0123456789") == stem]
    if isinstance(holder, nn.Sequential):
        return names if len(row) == len(names) else []
    return row if len(row) > 1 else []


def stream_of(model: nn.Module, path: str, cross: bool) -> str:
    """The stream of a module, from its path: `text`, `vision`, `audio`, or an encoder-decoder's `encoder`, `decoder` or
    `cross`."""
    lowered = path.lower()
    if cross or any(name in lowered for name in CROSS_NAMES) or _reads_memory(model, path):
        return "cross"
    return _own_stream(model, lowered)


def _own_stream(model: nn.Module, path: str) -> str:
    """The stream that a module belongs to, whatever it attends to, from its path in small letters."""
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and (side := _side(path)) is not None:
        return side
    words = re.split(r"[._\d]+", path)
    for stream, names in STREAM_NAMES.items():
        if any(word == name or (word.startswith(name) and name not in WHOLE_WORDS) for word in words for name in names):
            return stream
    return STREAM_INPUTS.get(main_input(model), "text")


def _reads_memory(model: nn.Module, path: str) -> bool:
    """Whether the module is the cross-attention of torch's own decoder layer."""
    parent, _, name = path.rpartition(".")
    return name == "multihead_attn" and isinstance(model.get_submodule(parent), nn.TransformerDecoderLayer)


def place_of(model: nn.Module, stream: str, path: str) -> str:
    """Where a module of this stream stands: `cross`, `encoder`, `decoder`, `signal` (pictures or sound) or `text`."""
    own = _own_stream(model, path.lower())
    if own in STREAM_INPUTS.values():  # also cross-attention inside a tower, such as that of BLIP-2's Q-former
        return "signal"
    if stream in ("cross", "encoder", "decoder"):
        return stream
    side = _side(path.lower())
    if side == "decoder" and type(model).__module__.startswith("transformers."):
        return "text"  # no encoder-decoder, by its configuration: a decoder's class of its own, or BLIP's text_decoder
    return side or "text"


def _side(path: str) -> str | None:
    sides = (part.rpartition("_")[2] for part in path.split("."))  # `encoder`, `text_encoder`
    return next((side for side in sides if side in ("encoder", "decoder")), None)


def kind_of(module: nn.Module, window: int | None, cross: bool, causal: bool, layer: int | None) -> AttentionKind:
    """`full`, `sliding:W`, `chunked:C` or `cross`, from the window that the call names and from the configuration."""
    if cross:
        return AttentionKind("cross")
    if window is None and getattr(module, "is_sliding", True):  # EXAONE 4 names the window in its full layers, too
        window = getattr(module, "sliding_window", None)
    if window is None and getattr(module, "attention_type", None) == "local":  # GPT-Neo
        window = getattr(getattr(module, "config", None), "window_size", None)
    if isinstance(window, int) and window > 0:
        return AttentionKind("sliding", window if causal else _keys_back(module, window))
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if types and chunk and layer is not None and layer < len(types) and types[layer] == "chunked_attention":
        return AttentionKind("chunked", chunk)
    return AttentionKind("full")


RADIUS = ("T5GemmaSelfAttention", "MuseGlimmerAssistantAttention")
"""Their window is the number of keys on each side of a query."""
RADIUS_BOTH_WAYS = ("Gemma4TextAttention", "Gemma4UnifiedTextAttention", "DiffusionGemmaEncoderTextAttention")
"""So is that of these, where the configuration says that text is read both ways, and not an image's tokens alone."""
WIDTH = ("T5Gemma2SelfAttention",)
"""Their window is the number of all keys that a query sees: of an even number, one more ahead than back."""


def _keys_back(module: nn.Module, window: int) -> int:
    """The keys that a query sees up to its own under a window both ways, which models of transformers count in three
    ways: most name what we do, as flash attention takes it."""
    name = type(module).__name__
    if name in WIDTH:
        return (window + 1) // 2
    both_ways = getattr(getattr(module, "config", None), "is_causal", True) is False
    return window + 1 if name in RADIUS or (name in RADIUS_BOTH_WAYS and both_ways) else window


def not_softmax(model: nn.Module, sites: Iterable[Site]) -> list[str]:
    """Paths of blocks that made no attention call, among the siblings of those that did: Mamba, linear attention,
    convolutions."""
    blocks = {site.block for site in sites if site.block is not None}
    parents = {block.rpartition(".")[0] for block in blocks}
    return [
        f"{parent}.{name}"
        for parent in sorted(parents)
        for name, _ in model.get_submodule(parent).named_children()
        if f"{parent}.{name}" not in blocks
    ]


def head_counts(model: nn.Module, path: str) -> set[int]:
    """Every head count that the attention module, its parent or a configuration names; empty where none does."""
    return _named_near(model, path) | _counts_of(getattr(model, "config", None))


def stream_width(model: nn.Module) -> int | None:
    """The channels of the residual stream that the model's configuration names for text; None where it names none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    width = getattr(text, "hidden_size", None)
    return width if isinstance(width, int) else None


def config_alone_counts(model: nn.Module, path: str) -> bool:
    """Whether only the model's configuration names head counts for a module of a person's own code, whose layers may
    have other ones."""
    own_code = not type(model.get_submodule(path)).__module__.startswith("transformers.")
    return own_code and not _named_near(model, path)


def _named_near(model: nn.Module, path: str) -> set[int]:
    owners = (model.get_submodule(path), model.get_submodule(path.rpartition(".")[0]))
    config = getattr(model, "config", None)
    configs = (getattr(owner, "config", None) for owner in owners)
    return set[int]().union(*map(_counts_of, (*owners, *(each for each in configs if each is not config))))


def _counts_of(holder: Any) -> set[int]:
    named = [getattr(holder, name, None) for name in HEAD_COUNTS]
    several = [count for counts in named if isinstance(counts, list | tuple) for count in counts]
    return {count for count in (*named, *several) if isinstance(count, int)}


def _under(path: str, ancestor: str) -> bool:
    return path == ancestor or path.startswith(ancestor + ".")
