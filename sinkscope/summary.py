"""summary.json: what a person wants to know first, per stream, with the baseline beside it and the answer in words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from sinkscope.capture import Site
from sinkscope.capture.sums import EARLY
from sinkscope.measured import Domain, SiteValues
from sinkscope.metrics.mass import eligible_keys
from sinkscope.statistics import mean, sem, uniform_alpha
from sinkscope.tables import Settings

EPSILONS = (0.2, 0.3, 0.5, 0.8)
TOP_POSITIONS = 5
JUMP = 5.0
"""The first token's norm jumps (or falls) where one block changes it by this factor or more."""

Stream = list[tuple[Site, list[SiteValues]]]
"""The sites of one stream, each with its values in every domain."""


def stream_summaries(
    domains: list[Domain], sites: list[Site], heads: pd.DataFrame, layers: pd.DataFrame,
    tokens: dict[str, list[str | None]], settings: Settings,
) -> dict[str, Any]:  # fmt: skip
    """One entry a stream, over all sequences of the domains given."""
    summaries = {}
    for name in dict.fromkeys(site.stream for site in sites):
        own = [site for site in sites if site.stream == name]
        stream = [(site, [d.sites[site.name] for d in domains if site.name in d.sites]) for site in own]
        shared = tokens[domains[0].name] if len(domains) == 1 else []
        summaries[name] = _stream(
            stream, heads[heads["stream"] == name], layers[layers["stream"] == name], shared, settings
        )
    return summaries


def _stream(
    stream: Stream, heads: pd.DataFrame, layers: pd.DataFrame, tokens: list[str | None], settings: Settings
) -> dict[str, Any]:
    queries = max(values.queries for _, parts in stream for values in parts)
    causal = all(values.causal for _, parts in stream for values in parts)
    rates = _sink_rates(stream, settings)
    summary: dict[str, Any] = {
        "layers": len(stream),
        "heads": sum(site.heads for site, _ in stream),
        "sequences": sum(len(values.heads) for values in stream[0][1]),
        "tokens_per_sequence": queries,
        "causal": causal,
        "sink_rate_percent": rates,
        "uniform_alpha_0": {
            "T": uniform_alpha(queries) if causal else 1 / queries,
            "t64": (uniform_alpha(EARLY) if causal else 1 / EARLY) if queries >= EARLY else None,
        },
    }
    for metric in ("bos_mass", "sink_score", "entropy", "first_argmax"):
        summary[metric] = _average(stream, metric)
    summary |= {
        "sink_heads": int(layers["sink_heads"].sum()),
        "top_positions": _top_positions(stream, tokens, settings.epsilon),
        "dormant": _dormant(heads, settings),
        "first_token_norm": _jumps(stream),
        "massive_activations": _massive(layers, tokens),
        "windows": _windows(stream, queries),
    }
    scores = sorted({site.score for site, _ in stream} - {"softmax"})
    summary["in_words"] = _raw_words(scores) if scores else _words(summary, settings)
    return summary


def _per_sequence(stream: Stream, metric: str) -> np.ndarray:
    """[sequence, head of any layer] values of one metric."""
    return np.concatenate([np.concatenate([v.head(metric) for v in parts]) for _, parts in stream], axis=1)


def _average(stream: Stream, metric: str) -> dict[str, float]:
    """Mean over the stream's heads and sequences; the standard error is that of the sequences' means."""
    over_heads = mean(_per_sequence(stream, metric).T)
    return {"mean": float(mean(over_heads)), "sem": float(sem(over_heads))}


def _sink_rates(stream: Stream, settings: Settings) -> dict[str, dict[str, float]]:
    """100 * mean over sequences, layers, heads of 1[alpha_0 > eps], at T and over the first 64 queries."""
    rates = {}
    scores = {"T": _per_sequence(stream, "sink_score"), "t64": _per_sequence(stream, "sink_score_t64")}
    for epsilon in sorted({*EPSILONS, settings.epsilon}):
        rates[f"{epsilon:g}"] = {
            name: float("nan") if np.isnan(values).all() else float(100 * (values > epsilon).mean())
            for name, values in scores.items()
        }
    return rates


def _top_positions(stream: Stream, tokens: list[str | None], epsilon: float) -> list[dict[str, Any]]:
    """The key positions with the largest mean over heads of alpha_k, and in how many heads it exceeds epsilon."""
    keys = min(eligible_keys(v.queries, v.keys, v.causal) for _, parts in stream for v in parts)
    alpha = np.concatenate([
        np.average([v.alpha[:, :keys] for v in parts], axis=0, weights=[len(v.heads) for v in parts])
        for _, parts in stream
    ])  # fmt: skip
    average = alpha.mean(0)
    order = np.argsort(-average, kind="stable")[:TOP_POSITIONS]
    return [
        {
            "position": int(k),
            "token": tokens[k] if k < len(tokens) else None,
            "mean_alpha": float(average[k]),
            "heads_over_epsilon": int((alpha[:, k] > epsilon).sum()),
        }
        for k in order
    ]


def _dormant(heads: pd.DataFrame, settings: Settings) -> dict[str, Any]:
    chosen = heads[heads["dormant"].fillna(False).astype(bool)]
    domains = heads["domain"].nunique() if "domain" in heads else 1
    counts = chosen.groupby(["layer", "head"], sort=False).size()
    named = sorted((int(layer), int(head)) for (layer, head), count in counts.items() if count == domains)
    return {"rule": settings.dormant_rule, "count": len(named), "heads": [list(pair) for pair in named]}


def _profile(stream: Stream, metric: str) -> np.ndarray:
    return np.array([float(mean(np.concatenate([v.layer(metric) for v in parts]))) for _, parts in stream])


def _jumps(stream: Stream) -> dict[str, Any]:
    """The block that raises, and the later one that lowers, the first token's norm most; null below a factor of 5."""
    with np.errstate(all="ignore"):
        change = _profile(stream, "norm_first_output") / _profile(stream, "norm_first")
    ratio = _profile(stream, "norm_ratio")
    result: dict[str, Any] = {"spike_layer": None, "fall_layer": None, "max_ratio": None}
    if np.isnan(change).all():
        return result
    result["max_ratio"] = float(np.nanmax(ratio))
    up = int(np.nanargmax(change))
    if change[up] >= JUMP:
        result["spike_layer"] = stream[up][0].layer
        down = up + int(np.nanargmin(change[up:]))
        if change[down] <= 1 / JUMP:
            result["fall_layer"] = stream[down][0].layer
    return result


def _massive(layers: pd.DataFrame, tokens: list[str | None]) -> dict[str, Any]:
    """Where the largest activation of the run sits, and the layers with massive ones (Sun et al.'s two bounds)."""
    if layers["max_abs"].isna().all():
        return {"present": None, "layers": [], "max_abs": None}
    row = layers.loc[layers["max_abs"].idxmax()]
    position = int(row["max_abs_token"])
    present = sorted({int(layer) for layer in layers.loc[layers["massive_tokens"] > 0, "layer"]})
    return {
        "present": bool(present),
        "layers": present,
        "max_abs": float(row["max_abs"]),
        "layer": int(row["layer"]),
        "position": position,
        "token": tokens[position] if position < len(tokens) else None,
        "channel": int(row["max_abs_dim"]),
    }


def _windows(stream: Stream, queries: int) -> dict[str, Any]:
    """Layers whose window is shorter than T: key 0 is out of reach for their later queries."""
    sizes = {site.layer: int(site.kind.partition(":")[2]) for site, _ in stream if ":" in site.kind}
    return {"layers_out_of_reach": sorted(layer for layer, size in sizes.items() if size < queries)}


def _raw_words(scores: list[str]) -> list[str]:
    return [
        f"Attention is not normalised ({', '.join(scores)}): masses are raw scores, no share of 1, and thresholds on "
        "them say nothing; entropy, uniformity, sink_margin and learned_sink_mass are empty. bos_share in "
        "positions.parquet is |A[i,0]| over the row's sum."
    ]


def _words(summary: dict[str, Any], settings: Settings) -> list[str]:
    words = []
    rate = summary["sink_rate_percent"][f"{settings.epsilon:g}"]["T"]
    base = summary["uniform_alpha_0"]["T"]
    top = summary["top_positions"][0]
    heads, sinks = summary["heads"], summary["sink_heads"]
    if sinks:
        words.append(
            f"Attention sink: {sinks} of {heads} heads give the first token a mean alpha_0 above {settings.epsilon:g} "
            f"(uniform attention gives {base:.3f}); sink rate {rate:.1f} %."
        )
    else:
        words.append(
            f"No sink at the first token: no head's mean alpha_0 exceeds {settings.epsilon:g} "
            f"(uniform attention gives {base:.3f})."
        )
    if top["position"] != 0 and top["heads_over_epsilon"]:
        words.append(f"The strongest sink is position {top['position']}, in {top['heads_over_epsilon']} heads.")
    massive = summary["massive_activations"]
    if massive["present"]:
        words.append(
            f"Massive activation: {massive['max_abs']:.4g} entering layer {massive['layer']}, position "
            f"{massive['position']}, channel {massive['channel']}."
        )
    elif massive["present"] is False:
        words.append("No massive activation: no element is above 100 and above 1000 x its layer's median.")
    dormant = summary["dormant"]
    words.append(f"Dormant by {dormant['rule']}: {dormant['count'] or 'none'} of {heads} heads.")
    far = len(summary["windows"]["layers_out_of_reach"])
    if far:
        words.append(
            f"{far} of {summary['layers']} layers have a window shorter than T: their later queries cannot reach the "
            "first token."
        )
    return words
