"""The summary of a run: each stream's sink rates, mean metrics, massive activations, dormant heads and norms, and
contrasts between domains."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import combinations

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.capture.scores import normalises
from sinkscope.runs.dormancy import agreement
from sinkscope.runs.request import Request
from sinkscope.runs.schema.stream import (
    Average,
    ChannelPosition,
    DormantHeads,
    FirstTokenNorm,
    MassiveActivations,
    MassiveChannel,
    PrefixValues,
    StreamSummary,
    TopPosition,
    Windows,
)
from sinkscope.runs.schema.summary import DomainContrast, DomainSummary, HeadContrast
from sinkscope.runs.statistics import (
    SIGNIFICANT,
    clustered_sem,
    false_discovery,
    mean,
    paired_difference,
    welch_difference,
)
from sinkscope.runs.words import in_words
from sinkscope.tables.values import Domain, PlacesOf, Stream

MASSIVE_POSITIONS = 3


def massive_activations(stream: Stream, layers: pd.DataFrame, tokens: list[str | None]) -> MassiveActivations:
    """Which layers hold elements above both bounds of Sun et al., and where the largest of these elements sits; the
    largest of all where no element is above both."""
    if layers["max_abs"].isna().all():
        return MassiveActivations(present=None, layers=[], max_abs=None)
    present = sorted({int(layer) for layer in layers.loc[layers["massive_tokens"] > 0, "layer"]})
    layer, largest = _largest(stream, bool(present))
    position = int(largest["max_abs_token"])
    return MassiveActivations(
        present=bool(present),
        layers=present,
        max_abs=largest["inf_norm"],
        layer=layer,
        position=position,
        token=token_at(tokens, position),
        channel=int(largest["max_abs_dim"]),
        over_token_median=largest["max_over_token_median"],
        over_layer_median=largest["max_over_layer_median"],
        channels=_massive_channels(stream, tokens),
    )


LARGEST = ("inf_norm", "max_abs_token", "max_abs_dim", "max_over_token_median", "max_over_layer_median")


def _largest(stream: Stream, massive: bool) -> tuple[int, dict[str, float]]:
    """The layer of the largest element, and what its sequence has there; among the massive elements alone if
    `massive`. A sequence's largest element is massive if any of its elements is."""
    peaks = []
    for site, parts in stream.measured:
        for values in parts:
            allowed = values.layer("massive_tokens") > 0 if massive else np.ones(values.count, bool)
            peak = np.where(allowed, values.layer("inf_norm"), np.nan)
            if not np.isnan(peak).all():
                peaks.append((float(np.nanmax(peak)), int(np.nanargmax(peak)), site.layer, values))
    _, sequence, layer, values = max(peaks, key=lambda entry: entry[0])
    return layer, {name: float(values.layer(name)[sequence]) for name in LARGEST}


def _massive_channels(stream: Stream, tokens: list[str | None]) -> list[MassiveChannel]:
    """The channels that hold most massive elements, most first, with the layers and positions of those elements.

    `tokens_per_sequence`: how many massive elements the channel has in one sequence, a mean over those layers.
    `positions`: the positions seen most often, each with the percent of (layer, sequence) pairs that have one there.
    """
    seen: dict[int, dict[int, Counter[int]]] = defaultdict(dict)
    counts: dict[int, int] = {}
    for site, parts in stream.measured:
        counts[site.layer] = max(counts.get(site.layer, 0), sum(values.count for values in parts))
        for (position, channel), count in sum((values.massive for values in parts), Counter()).items():
            seen[channel].setdefault(site.layer, Counter())[position] += count
    channels: list[tuple[float, MassiveChannel]] = []
    for channel, layers in seen.items():
        pairs, positions = sum(counts[layer] for layer in layers), sum(layers.values(), Counter())
        often = sorted(positions.items(), key=lambda item: (-item[1], item[0]))[:MASSIVE_POSITIONS]
        rate = positions.total() / pairs
        places = [
            ChannelPosition(position=place, token=token_at(tokens, place), percent=100 * count / pairs)
            for place, count in often
        ]
        entry = MassiveChannel(
            channel=channel, layers=sorted(layers), tokens_per_sequence=rate, positions=places
        )  # fmt: skip
        channels.append((len(layers) * rate, entry))
    channels.sort(key=lambda busy: (-busy[0], busy[1].channel))
    return [entry for _, entry in channels]


def token_at(tokens: list[str | None], position: int) -> str | None:
    """The token that all sequences have at a position; None where they differ."""
    return tokens[position] if position < len(tokens) else None


# Compares the BOS mass of every head between domains, with the false discovery rate controlled.
#
# A head that puts its mass on the first token in one domain and attends to other tokens in another is active-dormant
# (Guo et al. 2410.13835). Where two domains read the same documents, each sequence is its own control (a paired
# t-test); otherwise the samples are separate (Welch's test). Each difference comes with the 95 % interval of its test.


METRIC = "bos_mass"
SHOWN = ["stream", "layer", "head", "difference", "low", "high", "q"]


def contrast_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame | None:
    """domains.csv: one row per (pair of domains, stream, layer, head) that both measured; None where no two share one.

    `bos_mass_a`, `bos_mass_b`: means over sequences. `difference`: b - a. `sem`, `low`, `high`: its standard error and
    95 % interval (Student's t). `p`: two-sided t-test. `q`: Benjamini-Hochberg over all heads of the pair.
    `differs`: q < 0.05, where the interval leaves out 0 too; empty where a head has no p-value.
    """
    frames = []
    for a, b in combinations(domains, 2):
        shared = [site for site in sites if site.name in a.sites and site.name in b.sites]
        if shared:  # a watched program may run one part of its model under one label, and another under the next
            frames.append(_contrast(a, b, shared))
    return pd.concat(frames, ignore_index=True) if frames else None


def contrast_summary(table: pd.DataFrame) -> list[DomainContrast]:
    """One entry per pair of domains: number of heads tested, and the heads that differ, largest difference first."""
    entries = []
    for (a, b), rows in table.groupby(["domain_a", "domain_b"], sort=False):
        differing = rows[rows["differs"].fillna(False).astype(bool)]
        order = differing["difference"].abs().sort_values(ascending=False, kind="stable").index
        heads = [HeadContrast.model_validate(row) for row in differing.loc[order, SHOWN].to_dict("records")]
        entries.append(
            DomainContrast(
                a=str(a), b=str(b), paired=bool(rows["paired"].iloc[0]), metric=METRIC,
                heads_tested=int(rows["q"].notna().sum()), heads_that_differ=len(differing),
                false_discovery_rate=SIGNIFICANT, heads=heads,
            )
        )  # fmt: skip
    return entries


def _contrast(a: Domain, b: Domain, shared: list[Site]) -> pd.DataFrame:
    first = np.concatenate([a.sites[site.name].head(METRIC) for site in shared], axis=1)
    second = np.concatenate([b.sites[site.name].head(METRIC) for site in shared], axis=1)
    paired = len(first) == len(second) and a.reads_as(b, len(first))
    result = paired_difference(first, second) if paired else welch_difference(first, second)
    q = false_discovery(result.p)
    differs = pd.arrays.BooleanArray(q < SIGNIFICANT, np.isnan(q))
    places = pd.DataFrame(
        [(site.stream, site.layer, head, site.name) for site in shared for head in range(site.heads)],
        columns=["stream", "layer", "head", "module"],
    )
    names = pd.DataFrame({"domain_a": a.name, "domain_b": b.name, "paired": paired}, index=places.index)
    numbers = {
        "bos_mass_a": result.a, "bos_mass_b": result.b, "difference": result.difference, "sem": result.sem,
        "low": result.low, "high": result.high, "p": result.p, "q": q, "differs": differs,
    }  # fmt: skip
    return pd.concat([names, places, pd.DataFrame(numbers)], axis=1)


# The summary of every stream of a run: sink rates, mean metrics, top positions, dormant heads and norms.
#
# summary.json holds these records, and sentences that say the same in words.


EPSILONS = (0.2, 0.3, 0.5, 0.8)
TOP_POSITIONS = 5
JUMP = 5.0
"""The first token's norm jumps (or falls) where one block changes it by this factor or more."""


def domain_summaries(
    domains: list[Domain], sites: list[Site], heads: pd.DataFrame, layers: pd.DataFrame,
    places: PlacesOf, request: Request,
) -> dict[str, DomainSummary]:  # fmt: skip
    """The streams' summaries of each domain by itself. Empty where the run has one domain only."""
    if len(domains) == 1:
        return {}
    return {
        domain.name: DomainSummary(
            streams=stream_summaries(
                [domain], sites, heads[heads["domain"] == domain.name], layers[layers["domain"] == domain.name],
                places, request,
            )
        )
        for domain in domains
    }  # fmt: skip


def stream_summaries(
    domains: list[Domain], sites: list[Site], heads: pd.DataFrame, layers: pd.DataFrame,
    places: PlacesOf, request: Request,
) -> dict[str, StreamSummary]:  # fmt: skip
    """One summary for each stream, over all sequences of the domains given."""
    summaries, tokens = {}, _tokens(domains, sites, places)
    for name in dict.fromkeys(site.stream for site in sites):
        stream = Stream.of(domains, [site for site in sites if site.stream == name])
        if not stream.measured:
            continue
        summaries[name] = _stream(
            stream, heads[heads["stream"] == name], layers[layers["stream"] == name], tokens.get(name, []),
            tokens.get("decoder" if name == "cross" else name, []), request,
        )  # fmt: skip
    return summaries


def _tokens(domains: list[Domain], sites: list[Site], places: PlacesOf) -> dict[str, list[str | None]]:
    """The token that all sequences of the domains have at each position of a stream's keys; None where they differ."""
    shared: dict[str, list[list[str | None]]] = defaultdict(list)
    for domain in domains:
        measured = [site for site in sites if site.name in domain.sites]
        own = {site.stream: places[domain.name, site.name].shared for site in reversed(measured)}
        for stream, tokens in own.items():
            shared[stream].append(tokens)
    return {
        stream: [there[0] if len(set(there)) == 1 else None for there in zip(*each, strict=False)]
        for stream, each in shared.items()
    }


def _stream(
    stream: Stream, heads: pd.DataFrame, layers: pd.DataFrame, of_keys: list[str | None],
    of_queries: list[str | None], request: Request,
) -> StreamSummary:  # fmt: skip
    """`of_keys`, `of_queries`: the token that all sequences have at each position."""
    queries = max(values.queries for values in stream.parts)
    summary = StreamSummary(
        layers=len(stream.measured),
        heads=sum(site.heads for site, _ in stream.measured),
        sequences=stream.sequences,
        tokens_per_sequence=queries,
        causal=all(values.causal for values in stream.parts),
        sink_rate_percent=_sink_rates(stream, request),
        uniform_alpha_0=_uniform(stream),
        uniform_rate_percent=_uniform_rates(stream, request),
        bos_mass=_average(stream, "bos_mass"),
        sink_score=_average(stream, "sink_score"),
        entropy=_average(stream, "entropy"),
        first_argmax=_average(stream, "first_argmax"),
        sink_heads=int((mean(stream.heads("sink_score")) > request.epsilon).sum()),
        top_positions=_top_positions(stream, of_keys, request.epsilon),
        dormant=_dormant(heads, request),
        dormancy_scores=agreement(heads),
        first_token_norm=_jumps(stream),
        massive_activations=massive_activations(stream, layers, of_queries),
        windows=_windows(stream, queries),
    )
    scores = sorted({site.score for site, _ in stream.measured} - {"softmax"})
    summary.in_words = in_words(summary, scores, all(map(normalises, scores)), request)
    return summary


def _uniform(stream: Stream) -> PrefixValues:
    """alpha_0 of uniform attention over all queries and over the first 64, averaged as sink_score is: over the
    sequences and heads of every layer, so that windows and unequal lengths count as they do there."""
    whole, early = mean(_uniform_scores(stream))
    return PrefixValues(T=float(whole), t64=None if np.isnan(early) else float(early))


def _uniform_scores(stream: Stream) -> np.ndarray:
    """[sequences and heads of every layer, 2]: alpha_0 of uniform attention over all queries and the first 64."""
    return np.concatenate([v.arrays["uniform_alpha_0"].reshape(-1, 2) for v in stream.parts])


def _uniform_rates(stream: Stream, request: Request) -> dict[str, PrefixValues]:
    """The sink rates of uniform attention, as `_sink_rates`."""
    whole, early = _uniform_scores(stream).T
    return _rates(whole, early, request)


def _average(stream: Stream, metric: str) -> Average:
    """Mean over the stream's heads and sequences; the standard error is that of the sequences' means, of which those
    over one document, in several domains, count together."""
    over_heads = mean(stream.heads(metric).T)
    return Average(mean=float(mean(over_heads)), sem=clustered_sem(over_heads, stream.documents))


def _sink_rates(stream: Stream, request: Request) -> dict[str, PrefixValues]:
    """100 * mean over sequences, layers, heads of 1[alpha_0 > eps], at T and over the first 64 queries."""
    return _rates(stream.heads("sink_score"), stream.heads("sink_score_t64"), request)


def _rates(whole: np.ndarray, early: np.ndarray, request: Request) -> dict[str, PrefixValues]:
    """By threshold, the percent of these alpha_0 that exceed it: over all queries, and over the first 64."""
    return {
        f"{epsilon:g}": PrefixValues(T=_percent_above(whole, epsilon), t64=_percent_above(early, epsilon))
        for epsilon in sorted({*EPSILONS, request.epsilon})
    }


def _percent_above(values: np.ndarray, epsilon: float) -> float | None:
    """Percent of the values that exceed epsilon, of those that are there; None where all are missing."""
    there = values[~np.isnan(values)]
    return float(100 * (there > epsilon).mean()) if there.size else None


def _top_positions(stream: Stream, tokens: list[str | None], epsilon: float) -> list[TopPosition]:
    """The key positions with the largest mean over heads of alpha_k, and in how many heads it exceeds epsilon.

    A position counts where n_k >= n_max/4 in every head of every layer, and where some query sees it in every sequence.
    """
    places = _ranked_everywhere(stream)
    keys = places[-1] + 1 if len(places) else 0
    total, heads = np.zeros(keys), 0
    for site, _ in stream.measured:  # one site after the other: all heads of a long sequence together fill memory
        for head in _mean_alpha(stream, site, keys):
            total += head
            heads += 1
    average = total / heads
    places = places[~np.isnan(average[places])]
    order = places[np.argsort(-average[places], kind="stable")[:TOP_POSITIONS]]
    alpha = np.concatenate([_mean_alpha(stream, site, keys)[:, order] for site, _ in stream.measured])
    return [
        TopPosition(
            position=int(k),
            token=token_at(tokens, int(k)),
            mean_alpha=float(average[k]),
            heads_over_epsilon=int((alpha[:, place] > epsilon).sum()),
        )
        for place, k in enumerate(order)
    ]


def _ranked_everywhere(stream: Stream) -> np.ndarray:
    """The key positions that enough queries see in every head."""
    masks = [v.ranked for v in stream.parts]
    keys = min(ranked.shape[1] for ranked in masks)
    return np.flatnonzero(np.concatenate([ranked[:, :keys] for ranked in masks]).all(0))


def _mean_alpha(stream: Stream, site: Site, keys: int) -> np.ndarray:
    """[H, keys]: alpha_k of one site, mean over the sequences of all domains that reach k."""
    parts = [(domain, domain.sites[site.name]) for domain in stream.domains if site.name in domain.sites]
    alpha = np.stack([values.alpha[:, :keys] for _, values in parts])
    reached = np.stack([domain.reaching(values)[:keys] for domain, values in parts])
    return np.average(alpha, axis=0, weights=np.broadcast_to(reached[:, None], alpha.shape))


def _dormant(heads: pd.DataFrame, request: Request) -> DormantHeads:
    domains = heads["domain"].nunique() if "domain" in heads else 1
    verdicts = heads["dormant"].astype("boolean")
    known = heads[["layer", "head"]].assign(dormant=verdicts.fillna(False), active=~verdicts.fillna(True))
    counts = known.groupby(["layer", "head"]).sum()
    every, some = counts["dormant"] == domains, (counts["dormant"] > 0) & (counts["active"] > 0)
    unknown = (counts.sum(axis=1) < domains) & ~some
    named = [(int(layer), int(head)) for layer, head in counts.index[every]]
    return DormantHeads(
        rule=request.dormant_rule, count=len(named), heads=named, in_some_domains=int(some.sum()),
        unknown=int(unknown.sum()),
    )  # fmt: skip


def _profile(stream: Stream, metric: str) -> np.ndarray:
    return np.array([float(mean(np.concatenate([v.layer(metric) for v in parts]))) for _, parts in stream.measured])


def _jumps(stream: Stream) -> FirstTokenNorm:
    """The block that raises the first token's norm most, and the later one that lowers it most.

    A block that changes the norm by less than a factor of 5 is not named: the field is None.
    """
    with np.errstate(all="ignore"):
        change = _profile(stream, "norm_first_output") / _profile(stream, "norm_first")
    ratio = _profile(stream, "norm_ratio")
    largest = None if np.isnan(ratio).all() else float(np.nanmax(ratio))
    result = FirstTokenNorm(spike_layer=None, fall_layer=None, max_ratio=largest)
    if np.isnan(change).all():  # also where the first token is 0, as BOS is where it pads too
        return result
    up = int(np.nanargmax(change))
    if change[up] >= JUMP:
        result.spike_layer = stream.measured[up][0].layer
        down = up + int(np.nanargmin(change[up:]))
        if change[down] <= 1 / JUMP:
            result.fall_layer = stream.measured[down][0].layer
    return result


def _windows(stream: Stream, queries: int) -> Windows:
    """Layers whose window is shorter than T. Their later queries cannot reach key 0."""
    sizes = {site.layer: site.kind.size for site, _ in stream.measured if site.kind.size is not None}
    return Windows(layers_out_of_reach=sorted(layer for layer, size in sizes.items() if size < queries))
