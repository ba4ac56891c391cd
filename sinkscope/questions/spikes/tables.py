"""The spikes table of a scan that asked for it: who writes each massive channel, block by block.

All of a row is read at the spike's token: the position where the sequence's residual stream, entering any block of the
stream, has its largest absolute value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.statistics import mean, most_frequent, sem
from sinkscope.runs.words import dataset_of, on_dataset
from sinkscope.tables.columns import RUN_COLUMNS, run_column
from sinkscope.tables.values import Domain

ATTENTION, MLP = "attention", "mlp"
CHANNELS, NEURONS = 8, 8
STEP, SUPER = 0.1, 0.5
GUO = "Guo et al. 2410.13835; ours (the column)"
YU = "Yu et al. 2411.07191 (super weights); ours (the column)"

Weights = Callable[[int, int], np.ndarray]


@dataclass(frozen=True)
class Writers:
    """What is known of a block's parts: whether it has an MLP, and the weights that read its neurons, if one layer
    does: (channel, number of neurons) -> [neuron]."""

    has_mlp: bool
    weights: Weights | None


@dataclass
class PartRun:
    """One part of a block and one channel, over the sequences.

    `entering`, `writes`, `rise`: x_c entering the block, what the part adds to it, and the channel's rise, [sequence].
    `products`: activation x weight of every neuron, mean over sequences; None where they could not be read.
    """

    entering: np.ndarray
    writes: np.ndarray
    rise: np.ndarray
    products: np.ndarray | None

    @property
    def shares(self) -> np.ndarray:
        """Each write's share of the rise; NaN where nothing rises."""
        return np.divide(self.writes, self.rise, out=np.full_like(self.writes, np.nan), where=self.rise != 0)

    @property
    def mean_share(self) -> float:
        """The mean of these shares."""
        return float(mean(self.shares))

    def ranked(self) -> list[tuple[int, float]]:
        """(neuron, share) of the neurons with the largest products; empty where they could not be read or are 0."""
        if self.products is None or not self.products.any():
            return []
        shares = self.products / np.abs(self.products).sum()
        return [(int(n), float(shares[n])) for n in np.argsort(-np.abs(shares), kind="stable")[:NEURONS]]


@run_column("spikes", unit="activation", range="(-inf, inf)", source="ours")
def entering(run: PartRun) -> float:
    """x_c at the spike's token, as it enters the block: mean over sequences."""
    return float(mean(run.entering))


@run_column("spikes", unit="activation", range="(-inf, inf)", source=GUO)
def write(run: PartRun) -> float:
    """What the part adds to x_c at the spike's token, after any norm behind the part: mean over sequences. The two
    parts of a block add up to its change of x_c."""
    return float(mean(run.writes))


@run_column("spikes", unit="activation", range="[0, inf)", source="ours")
def write_sem(run: PartRun) -> float:
    """Standard error of write over sequences."""
    return float(sem(run.writes))


@run_column("spikes", unit="ratio", range="(-inf, inf)", source="ours")
def share(run: PartRun) -> float:
    """write divided by the rise of x_c, per sequence; then the mean over sequences. The rise is x_c where it is largest
    in absolute value among the blocks' inputs, minus x_c as it enters the first block. In a sequence, the shares of all
    parts before that largest value add up to 1. Empty where the rise is 0, since the value then comes with the
    embedding."""
    return run.mean_share


@run_column("spikes", unit="ratio", range="[0, inf)", source="ours")
def share_sem(run: PartRun) -> float:
    """Standard error of share over sequences."""
    return float(sem(run.shares))


@run_column(
    "spikes", unit="name", range="up, down, flat", source="2603.05498 (step-up and step-down blocks); our bound"
)
def step(run: PartRun) -> str | None:
    """up where share >= 0.1, down where share <= -0.1, otherwise flat."""
    value = run.mean_share
    return None if np.isnan(value) else "up" if value >= STEP else "down" if value <= -STEP else "flat"


@run_column("spikes", unit="neuron", range="[0, neurons)", source=YU)
def neuron(run: PartRun) -> float:
    """The neuron with the largest absolute product activation x weight[c, neuron] at the spike's token. The activation
    is a mean over sequences. Empty for attention, and where no single linear layer gives the MLP's output, as with
    experts."""
    ranked = run.ranked()
    return ranked[0][0] if ranked else np.nan


@run_column("spikes", unit="share", range="[-1, 1]", source=YU)
def neuron_share(run: PartRun) -> float:
    """The product of that neuron, divided by the sum of the absolute products of all neurons."""
    ranked = run.ranked()
    return ranked[0][1] if ranked else np.nan


@run_column("spikes", unit="name", range="NEURON:SHARE, eight of them", source=YU)
def neurons(run: PartRun) -> str | None:
    """The eight neurons with the largest absolute products, each with its share as in neuron_share."""
    return " ".join(f"{number}:{value:.4f}" for number, value in run.ranked()) or None


@run_column("spikes", unit="bool", range="true, false", source=YU)
def super_weight(run: PartRun) -> bool | None:
    """Whether one product makes up more than half: |neuron_share| > 0.5. weight[c, neuron] is then a super weight."""
    ranked = run.ranked()
    return abs(ranked[0][1]) > SUPER if ranked else None


def name_of(block: str, part: str) -> str:
    """The name under which a part's values are kept."""
    return f"spikes:{block}:{part}"


def spike_table(domains: list[Domain], sites: list[Site], writers: dict[str, Writers]) -> pd.DataFrame:
    """spikes.csv: one row per (stream, block, part, massive channel), for each domain where there are several."""
    rows = [row for domain in domains for row in _rows(domain, sites, writers)]
    keys = ["domain", "stream", "layer", "module", "part", "channel", "position"]
    table = pd.DataFrame(rows, columns=[*keys, *RUN_COLUMNS["spikes"]])
    numbers = {"layer": "int64", "channel": "int64", "position": "int64", "neuron": "Int64"}
    kinds = {"name": "string", "bool": "boolean"}
    types = {name: kinds.get(column.unit, "float64") for name, column in RUN_COLUMNS["spikes"].items()}
    table = table.astype({**types, **numbers, **dict.fromkeys(("domain", "stream", "module", "part"), "string")})
    return table if len(domains) > 1 else table.drop(columns="domain")


def _rows(domain: Domain, sites: list[Site], writers: dict[str, Writers]) -> list[dict[str, Any]]:
    rows = []
    for stream in dict.fromkeys(site.stream for site in sites):
        calls = [site for site in sites if site.stream == stream and _measured(domain, site)]
        calls = list({site.block: site for site in calls}.values())  # several attention calls of a block write together
        if not calls:
            continue
        inputs = np.stack([_value(domain, site, ATTENTION, "spike_entering") for site in calls])  # [block, sequence, D]
        position = most_frequent(_value(domain, calls[0], ATTENTION, "spike_position").astype(int).tolist())
        for channel in _channels(domain, sites, stream):
            rise = _rise(inputs[..., channel])
            for index, site in enumerate(calls):
                block = str(site.block)
                for part in (ATTENTION, MLP) if writers[block].has_mlp else (ATTENTION,):
                    run = _part_run(domain, site, part, channel, inputs[index, :, channel], rise, writers[block])
                    rows.append({
                        "domain": domain.name, "stream": stream, "layer": site.layer, "module": block, "part": part,
                        "channel": channel, "position": position,
                        **{name: column.compute(run) for name, column in RUN_COLUMNS["spikes"].items()},
                    })  # fmt: skip
    return rows


def _part_run(
    domain: Domain, site: Site, part: str, channel: int, entering: np.ndarray, rise: np.ndarray, writers: Writers
) -> PartRun:
    writes = _value(domain, site, part, "spike_write")[:, channel]
    products = None
    if part == MLP and writers.weights is not None:
        active = _value(domain, site, MLP, "spike_neurons").mean(0)
        products = active * writers.weights(channel, len(active))
    return PartRun(entering, writes, rise, products)


def _rise(entering: np.ndarray) -> np.ndarray:
    """x_c where |x_c| is largest minus x_c at the first block, [sequence], from [block, sequence]."""
    peak = np.abs(entering).argmax(0)
    return np.asarray(entering[peak, np.arange(entering.shape[1])] - entering[0])


def _channels(domain: Domain, sites: list[Site], stream: str) -> list[int]:
    """The channels that most often hold massive elements (Sun et al. 2402.17762), at most eight."""
    seen: Counter[int] = Counter()
    for site in sites:
        if site.stream == stream and site.name in domain.sites:
            for (_, channel), count in domain.sites[site.name].massive.items():
                seen[channel] += count
    return [channel for channel, _ in sorted(seen.items(), key=lambda item: (-item[1], item[0]))[:CHANNELS]]


def _measured(domain: Domain, site: Site) -> bool:
    return site.block is not None and name_of(site.block, ATTENTION) in domain.others


def _value(domain: Domain, site: Site, part: str, name: str) -> np.ndarray:
    return domain.others[name_of(str(site.block), part)].arrays[name]


def add_spikes(streams: dict[str, StreamSummary], table: pd.DataFrame, blind: set[str]) -> None:
    """Adds to the summary of each stream who writes its first massive channel. `blind`: streams whose blocks' parts
    could not be found."""
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        if len(rows) == 0:
            why = (
                "no two modules of a block add up to the change that it makes to the residual stream, so the writes of "
                "attention and MLP are not told apart"
                if name in blind
                else "no massive activation"
            )
            stream.in_words.append(f"Spikes: {why}.")
            continue
        rows = rows[rows["channel"] == rows["channel"].iloc[0]]
        if rows["share"].isna().all():
            channel = int(rows["channel"].iloc[0])
            nobody = {"layer": None, "part": "embedding", "share": None, "neuron": None}
            stream.measured["spikes"] = {"channel": channel, **nobody}
            stream.in_words.append(f"Spikes: the massive values of channel {channel} come with the embedding.")
            continue
        top = rows.loc[rows["share"].idxmax()]
        named = dataset_of(top, rows)
        stream.measured["spikes"] = named | {
            "channel": int(top["channel"]), "layer": int(top["layer"]), "part": str(top["part"]),
            "share": float(top["share"]), "neuron": None if pd.isna(top["neuron"]) else int(top["neuron"]),
        }  # fmt: skip
        own = rows[rows["domain"] == top["domain"]] if named else rows
        stream.in_words.append(_words(top, own, on_dataset(named)))


def _words(top: pd.Series, rows: pd.DataFrame, on: str) -> str:
    """`rows`: those of the same channel and dataset. `on`: the dataset, where there are several."""
    text = (
        f"Spikes{on}: the {top['part']} of layer {top['layer']} writes {100 * top['share']:.0f} % of the rise of "
        f"channel {top['channel']} at position {top['position']}"
    )
    if not pd.isna(top["neuron"]):
        held = f"neuron {top['neuron']} contributes {100 * abs(top['neuron_share']):.0f} %"
        text += f"; {held}{', a super weight' if top['super_weight'] else ''}"
    down = rows.loc[rows["share"].idxmin()]
    if down["step"] == "down":
        text += f"; the {down['part']} of layer {down['layer']} takes {-100 * down['share']:.0f} % away"
    return f"{text}."
