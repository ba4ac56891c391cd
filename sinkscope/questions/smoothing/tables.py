"""The smoothing table of a scan that asked for it: means of every head, verdicts, their counts and a sentence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.questions.smoothing.columns import CLUSTERS, LAMPERT, PARTS, WALKED
from sinkscope.runs.schema.stream import StreamSummary
from sinkscope.runs.words import of_heads
from sinkscope.tables.columns import run_column
from sinkscope.tables.frames import measured_table
from sinkscope.tables.values import Domain
from sinkscope.wiring.trace import Wiring

VERDICTS = ("smooths", "sharpens", "neither")
PATHS = ("falls", "rises", "turns")
PATTERNS = ("sink", "diagonal")
NOTHING = Wiring(None, None, None, None)

UNREAD = {
    "rank_w": "no single linear layer makes their values of the normalised tokens, none reads their outputs, quantised "
    "ones round too much, or W is 0",
    "rank_qk": "no single linear layer makes their queries or keys of the normalised tokens, quantised ones round too "
    "much, or the product is 0",
}
"""Why a rank of weights is missing, by column."""


@dataclass
class SmoothingRun:
    """What the run columns of smoothing are computed from, for one attention site and dataset: means over sequences
    [H] by name, and the numbers that depend on the weights only."""

    means: dict[str, np.ndarray]
    wiring: Wiring


@run_column("smoothing", unit="name", range="smooths, sharpens, neither", source=f"{LAMPERT}, conditions; our names")
def verdict(run: SmoothingRun) -> np.ndarray:
    """smooths if mean beta_tr_bw > 0: dense attention provably smooths more than sparse attention. sharpens if mean
    beta_tr_bw + mean tr_bwtw < 0. Otherwise neither. The means are over sequences. Empty where one is missing."""
    slope, square = run.means["beta_tr_bw"], run.means["tr_bwtw"]
    with np.errstate(invalid="ignore"):
        names = np.select([slope > 0, slope + square < 0], VERDICTS[:2], VERDICTS[2]).astype(object)
    names[np.isnan(slope) | np.isnan(square)] = None
    return names


@run_column("smoothing", unit="rank", range="[1, head dim]", source="ours, comparable to Lampert et al. fig. 12")
def rank_w(run: SmoothingRun) -> np.ndarray:
    """Stable rank |W|_F^2 / |W|_2^2. It depends on the weights only, not on the text. Empty where W_O^h or W_V^h could
    not be read from the weights, and where W is 0. The summary counts such heads."""
    return _ranks(run.wiring.rank_w, run)


@run_column("smoothing", unit="rank", range="[1, head dim]", source="ours, comparable to Lampert et al. fig. 12")
def rank_qk(run: SmoothingRun) -> np.ndarray:
    """Stable rank of diag(gain) W_Q^hT W_K^h diag(gain). Position encodings and biases are left out. Of an RMS norm on
    q and k, the gains are included, but not the division. Empty where W_Q^h or W_K^h could not be read from the
    weights, where a norm on q or k subtracts their mean, as a layer norm does, and where the product is 0. The summary
    counts such heads."""
    return _ranks(run.wiring.rank_qk, run)


@run_column("smoothing", unit="cost", range="[0, inf)", source="ours")
def cost_actual(run: SmoothingRun) -> np.ndarray:
    """(|W_Q^h diag(gain)|_F^2 + |W_K^h diag(gain)|_F^2) / 2 of the head's own weights. It is half of cost_qk, which has
    the unit of the bounds. Values and MLP, which the upper bounds include, are left out. A key head that several query
    heads share counts fully for each of them. Empty where W_Q^h or W_K^h could not be read, where q or k is normalised,
    so that the size of the weights means nothing, and where s of cost_sink_lower could not be found."""
    return _ranks(run.wiring.cost_qk, run)


@run_column("smoothing", unit="name", range="sink, diagonal, undecided", source=f"{LAMPERT} section 7; our reading")
def cheaper(run: SmoothingRun) -> np.ndarray:
    """sink if the mean of cost_sink_upper is below that of cost_diagonal_lower. diagonal if the mean of
    cost_diagonal_upper is below that of cost_sink_lower. Otherwise undecided. The means are over sequences. Empty where
    one is missing."""
    low = {name: run.means[f"cost_{name}_lower"] for name in ("sink", "diagonal")}
    high = {name: run.means[f"cost_{name}_upper"] for name in ("sink", "diagonal")}
    with np.errstate(invalid="ignore"):
        conditions = [high["sink"] < low["diagonal"], high["diagonal"] < low["sink"]]
    names = np.select(conditions, ["sink", "diagonal"], "undecided").astype(object)
    names[np.isnan(np.stack([*low.values(), *high.values()])).any(0)] = None
    return names


@run_column("smoothing", unit="cost", range="[0, inf)", source="ours")
def cost_qk(run: SmoothingRun) -> np.ndarray:
    """|W_Q^h diag(gain)|_F^2 + |W_K^h diag(gain)|_F^2 of the head's own weights, in the unit of the columns that end in
    _qk. It is twice cost_actual, and empty where that is empty."""
    return 2 * _ranks(run.wiring.cost_qk, run)


@run_column("smoothing", unit="name", range="sink, diagonal, undecided", source=PARTS)
def cheaper_qk(run: SmoothingRun) -> np.ndarray:
    """By queries and keys alone: sink if the mean of cost_sink_upper_qk is below that of cost_diagonal_lower_qk,
    diagonal if the mean of cost_diagonal_upper_qk is below that of cost_sink_lower_qk, otherwise undecided. The means
    are over sequences. Empty where the head has no cost."""
    return _cheaper(run, run.means["cost_sink_upper_qk"], run.means["cost_diagonal_upper_qk"])


@run_column("smoothing", unit="name", range="sink, diagonal, undecided", source=PARTS)
def cheaper_block(run: SmoothingRun) -> np.ndarray:
    """By the whole block: as cheaper_qk, with the mean of cost_sink_upper_value or cost_diagonal_upper_value added to
    each upper bound. The lower bounds have no such part."""
    upper = {name: run.means[f"cost_{name}_upper_qk"] + run.means[f"cost_{name}_upper_value"] for name in PATTERNS}
    return _cheaper(run, upper["sink"], upper["diagonal"])


@run_column("smoothing", unit="name", range="falls, rises, turns", source=WALKED)
def spread_path(run: SmoothingRun) -> np.ndarray:
    """What the spread V(lam) of path_slope_own does as lam goes from 0 to 1: it falls if mean path_slope_dense < 0, and
    rises if mean path_slope_own > 0. Otherwise it turns: it falls first, then rises. The means are over sequences.
    Empty where one is missing. For tokens drawn independently it falls where verdict is smooths, rises where it is
    sharpens, and turns where it is neither."""
    own, dense = run.means["path_slope_own"], run.means["path_slope_dense"]
    with np.errstate(invalid="ignore"):
        names = np.select([dense < 0, own > 0], PATHS[:2], PATHS[2]).astype(object)
    names[np.isnan(own) | np.isnan(dense)] = None
    return names


@run_column("smoothing", unit="name", range="sink, undecided", source=CLUSTERS)
def cheaper_groups(run: SmoothingRun) -> np.ndarray:
    """As cheaper_qk, with C = token_groups: sink if the mean of cost_sink_upper_groups is below that of
    cost_diagonal_lower_groups, otherwise undecided. It is never diagonal, because no upper bound for a diagonal pattern
    is below the sink's lower bound. Empty where the head has no cost."""
    high, low = run.means["cost_sink_upper_groups"], run.means["cost_diagonal_lower_groups"]
    with np.errstate(invalid="ignore"):
        names = np.where(high < low, "sink", "undecided").astype(object)
    names[np.isnan(high)] = None
    return names


def _cheaper(run: SmoothingRun, sink: np.ndarray, diagonal: np.ndarray) -> np.ndarray:
    """From the two upper bounds. One that is missing decides nothing."""
    low = {name: run.means[f"cost_{name}_lower_qk"] for name in PATTERNS}
    with np.errstate(invalid="ignore"):
        names = np.select([sink < low["diagonal"], diagonal < low["sink"]], PATTERNS, "undecided").astype(object)
    names[np.isnan(low["sink"])] = None
    return names


def _ranks(ranks: Tensor | None, run: SmoothingRun) -> np.ndarray:
    heads = len(run.means["beta"])
    return np.full(heads, np.nan) if ranks is None else ranks.cpu().numpy()


def smoothing_table(domains: list[Domain], sites: list[Site], wirings: dict[str, Wiring]) -> pd.DataFrame:
    """smoothing.csv: one row per (stream, layer, head), for each dataset where there are several."""
    return measured_table(
        "smoothing", domains, sites,
        lambda domain, site, means: SmoothingRun(means, wirings.get(site.name, NOTHING)),
    )  # fmt: skip


def add_verdicts(streams: dict[str, StreamSummary], table: pd.DataFrame) -> None:
    """Adds the counts of verdicts, and a sentence about them, to the summary of each stream."""
    for name, stream in streams.items():
        rows = table[table["stream"] == name]
        stream.smoothing = counts = _counts(rows)
        stream.ranks_missing = _missing(rows)
        heads = len(rows.groupby(["module", "head"]))
        where = " in some dataset" if "domain" in rows and rows["domain"].nunique() > 1 else ""
        stream.in_words += [_words(counts, heads, where), *_missing_words(stream.ranks_missing, heads)]


def _counts(rows: pd.DataFrame) -> dict[str, int]:
    """Number of heads by verdict. `differs`: not the same in every dataset; `missing`: W could not be read; `equal`:
    all tokens behind the first are equal, in some dataset."""
    counts = dict.fromkeys((*VERDICTS, "differs", "missing", "equal"), 0)
    for _, head in rows.groupby(["module", "head"], sort=False):
        verdicts = head["verdict"]
        if head["tr_bw"].isna().any():
            counts["missing"] += 1
        elif verdicts.isna().any():
            counts["equal"] += 1
        else:
            counts[verdicts.iloc[0] if verdicts.nunique() == 1 else "differs"] += 1
    return counts


def _missing(rows: pd.DataFrame) -> dict[str, int]:
    """Number of heads without a value, for each rank of weights that some head lacks."""
    heads = rows.groupby(["module", "head"], sort=False)
    counts = {name: int(heads[name].apply(lambda values: values.isna().any()).sum()) for name in UNREAD}
    return {name: count for name, count in counts.items() if count}


def _missing_words(missing: dict[str, int], heads: int) -> list[str]:
    return [
        f"{name} is empty in {count} of {heads} head{'s' * (heads != 1)}: {UNREAD[name]}."
        for name, count in missing.items()
    ]


def _words(counts: dict[str, int], heads: int, where: str = "") -> str:
    """`where`: that tokens may be equal in one of several datasets alone."""
    if counts["missing"] == heads:
        return "Smoothing: no head's W_V could be read."
    if counts["equal"] == heads:
        return f"Smoothing: the tokens behind the first are all equal{where}, and cannot be made more similar."
    smooths = counts["smooths"]
    text = (
        f"Smoothing: {of_heads(smooths, heads, 'make')} tokens more similar the denser "
        f"{'it attends' if smooths == 1 else 'they attend'}, "
        f"{counts['sharpens']} less similar, {counts['neither']} neither"
    )
    if counts["differs"]:
        text += f", {counts['differs']} differ between datasets"
    if counts["equal"]:
        text += f"; in {counts['equal']} the tokens behind the first are all equal{where}"
    return text + (f"; {counts['missing']} could not be read." if counts["missing"] else ".")
