"""Massive activations of a stream (Sun et al. 2402.17762): the largest, and the channels that hold most of them."""

from __future__ import annotations

from collections import Counter, defaultdict

import numpy as np
import pandas as pd

from sinkscope.runs.schema.stream import ChannelPosition, MassiveActivations, MassiveChannel
from sinkscope.tables.values import Stream

TOP_POSITIONS, TOP_CHANNELS = 3, 8


def massive_activations(stream: Stream, layers: pd.DataFrame, tokens: list[str | None]) -> MassiveActivations:
    """Which layers hold elements above both bounds of Sun et al., and where the largest of these elements sits; the
    largest of all where no element is above both."""
    if layers["max_abs"].isna().all():
        return MassiveActivations(present=None, layers=[], max_abs=None)
    present = sorted({int(layer) for layer in layers.loc[layers["massive_tokens"] > 0, "layer"]})
    layer, found = _largest(stream, bool(present))
    position = int(found["max_abs_token"])
    return MassiveActivations(
        present=bool(present),
        layers=present,
        max_abs=found["inf_norm"],
        layer=layer,
        position=position,
        token=token_at(tokens, position),
        channel=int(found["max_abs_dim"]),
        over_token_median=found["max_over_token_median"],
        over_layer_median=found["max_over_layer_median"],
        channels=_massive_channels(stream, tokens),
    )


LARGEST = ("inf_norm", "max_abs_token", "max_abs_dim", "max_over_token_median", "max_over_layer_median")


def _largest(stream: Stream, massive: bool) -> tuple[int, dict[str, float]]:
    """The layer of the largest element, and what its sequence has there; among the massive elements alone if
    `massive`. A sequence's largest element is massive if any of its elements is."""
    peaks = []
    for site, parts in stream:
        for values in parts:
            allowed = values.layer("massive_tokens") > 0 if massive else np.ones(values.count, bool)
            peak = np.where(allowed, values.layer("inf_norm"), np.nan)
            if not np.isnan(peak).all():
                peaks.append((float(np.nanmax(peak)), int(np.nanargmax(peak)), site.layer, values))
    _, sequence, layer, values = max(peaks, key=lambda each: each[0])
    return layer, {name: float(values.layer(name)[sequence]) for name in LARGEST}


def _massive_channels(stream: Stream, tokens: list[str | None]) -> list[MassiveChannel]:
    """The channels that hold most massive elements, most first, with the layers and positions of those elements.

    `tokens_per_sequence`: how many massive elements the channel has in one sequence, a mean over those layers.
    `positions`: the positions seen most often, each with the percent of (layer, sequence) pairs that have one there.
    """
    seen: dict[int, dict[int, Counter[int]]] = defaultdict(dict)
    for site, parts in stream:
        for (position, channel), count in sum((values.massive for values in parts), Counter()).items():
            seen[channel].setdefault(site.layer, Counter())[position] += count
    sequences = sum(values.count for values in stream[0][1])
    found: list[tuple[float, MassiveChannel]] = []
    for channel, layers in seen.items():
        pairs, positions = len(layers) * sequences, sum(layers.values(), Counter())
        often = sorted(positions.items(), key=lambda item: (-item[1], item[0]))[:TOP_POSITIONS]
        each = positions.total() / pairs
        places = [
            ChannelPosition(position=place, token=token_at(tokens, place), percent=100 * count / pairs)
            for place, count in often
        ]
        entry = MassiveChannel(
            channel=channel, layers=sorted(layers), tokens_per_sequence=each, positions=places
        )  # fmt: skip
        found.append((len(layers) * each, entry))
    found.sort(key=lambda busy: (-busy[0], busy[1].channel))
    return [entry for _, entry in found[:TOP_CHANNELS]]


def token_at(tokens: list[str | None], position: int) -> str | None:
    """The token that all sequences have at a position; None where they differ."""
    return tokens[position] if position < len(tokens) else None
