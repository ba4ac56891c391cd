"""Finds what stands at the positions of every stream: tokens of a text, patches of a picture, frames of a sound."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import nn

from sinkscope.engine.input_kinds import blaming
from sinkscope.inputs.batches import TokenData
from sinkscope.inputs.chats import region_names
from sinkscope.inputs.signals import PIXELS
from sinkscope.tables.frames import sites_of
from sinkscope.tables.values import Domain, Places, PlacesOf, text_regions

if TYPE_CHECKING:
    from sinkscope.engine.loop import Loop

LEADING = {
    "cls_token": "class", "class_embedding": "class", "class_token": "class", "cls_emb": "class",
    "distillation_token": "distillation", "register_tokens": "register",
}  # fmt: skip
"""Regions that stand before patches and frames, in this order, by the last name of their parameter."""

TRAILING = {"detection_tokens": "detection"}
"""Regions that stand behind them."""

UNKNOWN = "unknown"
"""The region of a token in a conversation of which the template does not tell whose it is."""

APPENDED = ("Llama4VisionModel",)
"""Vision models that put their class token after the patches."""


def places_of(loop: Loop, domains: list[Domain]) -> PlacesOf:
    """The places of every attention call's keys in every domain, for the sequences that were measured."""
    places: PlacesOf = {}
    for domain, data in zip(domains, loop.reading.tokens, strict=False):
        shared: dict[tuple[str, int], Places] = {}
        for _, site, values in sites_of([domain], loop.sites):
            stream_keys = site.stream, values.keys
            if stream_keys not in shared:
                shared[stream_keys] = _places(loop, domain, data, *stream_keys).cut(values.count)
            places[domain.name, site.name] = shared[stream_keys]
    return places


def _places(loop: Loop, domain: Domain, data: TokenData, stream: str, keys: int) -> Places:
    tokens = _tokens(loop, domain, data, stream)
    if tokens is not None and tokens.regions.shape[1] == keys:
        return tokens
    unit = {"vision": "patch", "audio": "frame"}.get(stream, _unit(loop.forward.signal))
    signal = loop.forward.signal  # of a model that reads text too, only the pictures are known to have such positions
    added = _added(loop.checkpoint.model, keys) if unit == "patch" or (unit == "frame" and signal) else {}
    row = np.array([added.get(place, unit) for place in range(keys)])
    return Places(np.broadcast_to(row, (len(domain.ids), keys)))


def _tokens(loop: Loop, domain: Domain, data: TokenData, stream: str) -> Places | None:
    """The tokens that a stream reads; None for a stream of patches or frames."""
    tokenizer, forward = loop.checkpoint.tokenizer, loop.forward
    if data.extras is not None and stream in ("vision", "audio"):
        return None
    if stream == "decoder" and data.decoder is not None:
        special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        return Places(text_regions(data.decoder, special), data.decoder, tokenizer)
    reading = loop.reading
    ids = domain.ids
    if stream == "decoder" and forward.decodes and forward.start is not None:
        ids = np.where(ids < 0, ids, np.insert(ids[:, :-1], 0, forward.start, axis=1))
    speakers = domain.corpus.regions
    if speakers is not None and ids is domain.ids:
        names = region_names(speakers)
        return Places(np.where((names == "") & (ids >= 0), UNKNOWN, names), ids, reading.tokenizer)
    with blaming(type(reading.kind)):
        regions = reading.kind.regions(ids, reading.rules)
    return None if regions is None else Places(regions, ids, reading.tokenizer)


def _unit(signal: str | None) -> str:
    """The name of the positions of a model that reads only this signal."""
    if signal is None:
        return "position"
    return "patch" if signal == PIXELS else "frame"


def _added(model: nn.Module, positions: int) -> dict[int, str]:
    """The regions of the positions of a transformer over pictures or sound that are no patches and no frames."""
    counts: dict[str, int] = {}
    appended = False
    for name, parameter in model.named_parameters():
        owner, _, leaf = name.rpartition(".")
        region = (LEADING | TRAILING).get(leaf)
        if region is None or region in counts or parameter.dim() == 0:
            continue
        appended |= type(model.get_submodule(owner)).__name__ in APPENDED
        counts[region] = parameter.shape[-2] if parameter.dim() > 1 else 1
    before, behind = (
        [region for region in dict.fromkeys(table.values()) for _ in range(counts.get(region, 0))]
        for table in (LEADING, TRAILING)
    )
    if appended:
        before, behind = [], before + behind
    if len(before) + len(behind) >= positions:
        return {}
    return dict(enumerate(before)) | dict(enumerate(behind, positions - len(behind)))
