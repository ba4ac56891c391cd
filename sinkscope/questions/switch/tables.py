"""The tables of `--measure switch`: means of every head, the tokens that switch heads on, cosines by position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import erfc

from sinkscope.capture import Site
from sinkscope.inputs.rules import token_text
from sinkscope.questions.switch.columns import ESTIMATOR, ROWS
from sinkscope.runs.statistics import false_discovery, mean
from sinkscope.tables.columns import RUN_COLUMNS, run_column
from sinkscope.tables.frames import domain_key, measured_table, site_keys, sites_of
from sinkscope.tables.values import Domain, SiteValues, as_one

COUNTS, OPENED = "switch_counts", "switch_opened"
FEWEST = 10
"""Occurrences from which on a token is tested."""
CHANCE = 0.05
SOME, NEARLY_ALL = 0.05, 0.9
"""A head has a pattern of section 7 where each of both kinds of rows is SOME of all, and both are NEARLY_ALL."""
FIG1 = "Lampert et al. 2605.08453 fig. 1; we could not read whether before or after the input norm: both are given"


@dataclass(frozen=True)
class SwitchRun:
    """What the run columns of switch.csv are computed from: means over sequences [H] by name."""

    means: dict[str, np.ndarray]


@run_column("switch", unit="share", range="[0, 1]", source=ESTIMATOR)
def off_when_sunk(run: SwitchRun) -> np.ndarray:
    """1 - (mean sunk_not_off) / (mean sink_rows): of the head's queries on the sink, the share that is off. Near 1, the
    head is off when it attends to the sink; near 0, it writes there too. Empty where no query is on the sink."""
    sunk = run.means["sink_rows"]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(sunk > 0, 1 - run.means["sunk_not_off"] / sunk, np.nan)


@run_column("switch", unit="name", range="sink+copy, diagonal+copy, other", source=ROWS)
def row_pattern(run: SwitchRun) -> np.ndarray:
    """sink+copy if mean sink_rows >= 0.05, mean copy_rows >= 0.05 and their sum is >= 0.9: nearly every query attends
    to the first token or to other tokens, as the dormant and copy tokens of section 7 do. diagonal+copy if the same
    holds with self_rows instead of sink_rows. Otherwise other. The means are over sequences. Empty where one is
    missing."""
    copy = run.means["copy_rows"]
    resting = [run.means[name] for name in ("sink_rows", "self_rows")]
    with np.errstate(invalid="ignore"):
        conditions = [(rest >= SOME) & (copy >= SOME) & (rest + copy >= NEARLY_ALL) for rest in resting]
    names = np.select(conditions, ["sink+copy", "diagonal+copy"], "other").astype(object)
    names[np.isnan(np.stack([copy, *resting])).any(0)] = None
    return names


@dataclass(frozen=True)
class TokenRun:
    """What the columns of switch_tokens.csv are computed from: some heads and tokens of one dataset, row by row.

    Attributes:
        number: occurrences of the token, i >= 1. on: those in which the head is on.
        head_rate: the head's share of rows that are on.
        q: Benjamini-Hochberg's q.
    """

    number: np.ndarray
    on: np.ndarray
    head_rate: np.ndarray
    q: np.ndarray


@run_column("switch_tokens", unit="tokens", range="[10, inf)")
def n(run: TokenRun) -> np.ndarray:
    """Number of occurrences of the token at i >= 1, over all sequences of the dataset."""
    return run.number.astype(np.int64)


@run_column("switch_tokens", unit="share", range="[0, 1]")
def on_rate(run: TokenRun) -> np.ndarray:
    """Share of these occurrences in which the head is on: norm(W_O^h o_i) >= 0.1 m, where i is the position of the
    token."""
    return run.on / run.number


@run_column("switch_tokens", unit="ratio", range="[0, inf)")
def lift(run: TokenRun) -> np.ndarray:
    """on_rate divided by the head's on_rate over all tokens together. Above 1, the token switches the head on; below 1,
    it switches the head off."""
    return on_rate(run) / run.head_rate


@run_column("switch_tokens", unit="probability", range="[0, 0.05)")
def q(run: TokenRun) -> np.ndarray:
    """p-value adjusted by Benjamini-Hochberg over all tests of the dataset, in all layers. Each head is tested with
    each token that has n >= 10. In a sequence that holds the token, d = (its occurrences with the head on) - (its
    occurrences) x (share of this sequence's queries i >= 1 with the head on). The test is of z = sum d / sqrt(sum d^2),
    the sums being over these sequences; it is two-sided, under the normal distribution. So queries of one sequence need
    not be independent. |z| is at most the square root of the number of these sequences. Where every d is 0, as in a
    head that is always on, there is no test. The table has only rows with q < 0.05."""
    return run.q


@dataclass(frozen=True)
class AlignmentRun:
    """What the columns of alignment.parquet are computed from, for one site and dataset.

    `moments`: cos(x_0, x_j), its square, cos(z_0, z_j), its square: [4, T], means over sequences. `number`: sequences
    that reach each position, [T].
    """

    moments: np.ndarray
    number: np.ndarray

    def error(self, which: int) -> np.ndarray:
        """Standard error of the mean in row `which` of `moments`."""
        spread = np.maximum(self.moments[which + 1] - self.moments[which] ** 2, 0.0)
        return np.sqrt(np.where(self.number > 1, spread / np.maximum(self.number - 1, 1), np.nan))


@run_column("alignment", unit="cosine", range="[-1, 1]", source=FIG1)
def cos_residual(run: AlignmentRun) -> np.ndarray:
    """cos(x_0, x_j) with j = the position: mean over the sequences that reach it."""
    return run.moments[0]


@run_column("alignment", unit="cosine", range="[0, inf)", source="ours")
def cos_residual_sem(run: AlignmentRun) -> np.ndarray:
    """Standard error of cos_residual over sequences."""
    return run.error(0)


@run_column("alignment", unit="cosine", range="[-1, 1]", source=FIG1)
def cos_input(run: AlignmentRun) -> np.ndarray:
    """cos(z_0, z_j) with j = the position: mean over the sequences that reach it."""
    return run.moments[2]


@run_column("alignment", unit="cosine", range="[0, inf)", source="ours")
def cos_input_sem(run: AlignmentRun) -> np.ndarray:
    """Standard error of cos_input over sequences."""
    return run.error(2)


def switch_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """switch.csv: one row per (stream, layer, head), for each dataset where there are several."""
    return measured_table("switch", domains, sites, lambda domain, site, means: SwitchRun(means))


def whole_tables(domains: list[Domain], sites: list[Site]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """switch.csv, and the compensation of each layer, over the sequences of all datasets together."""
    whole = as_one(domains, ("switch", "layers"))
    layers = [
        {"stream": site.stream, "module": site.name, "heads": site.heads}
        | {name: float(mean(values.layer(name))) for name in ("compensation", "compensation_unrelated")}
        for _, site, values in sites_of([whole], sites)
    ]
    return switch_table([whole], sites), pd.DataFrame(layers)


def alignment_table(domains: list[Domain], sites: list[Site]) -> pd.DataFrame:
    """alignment.parquet: one row per (stream, layer, position), for each dataset where there are several."""
    frames = []
    for domain, site, values in sites_of(domains, sites):
        moments = values.arrays.get("alignment")
        if moments is None or np.isnan(moments).all():
            continue
        run = AlignmentRun(moments, domain.reaching(values))
        rows = domain_key(domains, domain) | site_keys(site) | {"module": site.name}
        rows |= {"position": np.arange(moments.shape[1])}
        frames.append(
            pd.DataFrame(rows | {name: column.compute(run) for name, column in RUN_COLUMNS["alignment"].items()})
        )
    return _joined(frames, domains, {"position": "int64"}, "alignment")


def token_table(domains: list[Domain], sites: list[Site], tokenizer: Any) -> pd.DataFrame:
    """switch_tokens.csv: one row per head and token that switches it beyond chance, for each dataset."""
    frames = []
    for domain in domains:
        by_site = [
            (domain_key(domains, domain) | site_keys(site), site, *_by_token(values))
            for _, site, values in sites_of([domain], sites)
            if COUNTS in values.arrays
        ]
        p = [_chance(counts, opened) for _, _, counts, opened in by_site]
        for (keys, site, counts, opened), q_values in zip(by_site, _controlled(p), strict=True):
            frames.append(_token_rows(keys | {"module": site.name}, counts, opened, q_values, tokenizer))
    return _joined(frames, domains, {"token_id": "int64", "token": "string", "n": "int64"}, "switch_tokens")


@dataclass(frozen=True)
class TokenTests:
    """What the tests of switch_tokens.csv could find in one stream and dataset.

    Attributes:
        frequent: whether some token occurs often enough to be tested.
        tests: number of tests in the dataset.
        sequences: the most sequences that hold a tested token of the stream.
        needed: in how many a token must stand for its test to have q < 0.05 whatever the others give.
    """

    frequent: bool
    tests: int
    sequences: int
    needed: int


def token_tests(domains: list[Domain], sites: list[Site]) -> dict[tuple[str, str], TokenTests]:
    """By dataset and stream."""
    made = {}
    for domain in domains:
        by_site = [
            (site.stream, *_by_token(values))
            for _, site, values in sites_of([domain], sites)
            if COUNTS in values.arrays
        ]
        tested = [~np.isnan(_chance(counts, opened)) for _, counts, opened in by_site]
        total = sum(int(mask.sum()) for mask in tested)
        for stream in {stream for stream, *_ in by_site}:
            pairs = [(counts, mask) for (name, counts, _), mask in zip(by_site, tested, strict=True) if name == stream]
            made[domain.name, stream] = TokenTests(
                frequent=any((counts[:, 1] >= FEWEST).any() for counts, _ in pairs),
                tests=total,
                sequences=max(int(counts[mask.any(1), 2].max(initial=0)) for counts, mask in pairs),
                needed=_needed(total),
            )
    return made


def _needed(tests: int) -> int:
    """The least number of sequences whose largest |z|, its square root, has p < 0.05 / tests."""
    sequences = 1
    while erfc(np.sqrt(sequences / 2)) * max(tests, 1) >= CHANCE:
        sequences += 1
    return sequences


def _by_token(values: SiteValues) -> tuple[np.ndarray, np.ndarray]:
    """Joins the counts of all batches: tokens [token, 3] and [token, head, 3], as `Places` counts them."""
    counts, opened = values.arrays[COUNTS], values.arrays[OPENED]
    tokens, place = np.unique(counts[:, 0], return_inverse=True)
    total, on = np.zeros((len(tokens), 3)), np.zeros((len(tokens), *opened.shape[1:]))
    np.add.at(total, place, counts)
    np.add.at(on, place, opened)
    total[:, 0] = tokens
    return total, on


def _chance(counts: np.ndarray, opened: np.ndarray) -> np.ndarray:
    """Two-sided p of each token and head, [token, head]; NaN for rare tokens, and where d is 0 in every sequence."""
    with np.errstate(invalid="ignore", divide="ignore"):
        p = erfc(np.abs(opened[..., 1] / np.sqrt(opened[..., 2])) / np.sqrt(2))
    return np.where(counts[:, 1:2] >= FEWEST, p, np.nan)


def _controlled(p: list[np.ndarray]) -> list[np.ndarray]:
    """Benjamini-Hochberg's q over all p of all arrays; NaN where p is."""
    flat = false_discovery(np.concatenate([array.ravel() for array in p])) if p else np.empty(0)
    edges = np.cumsum([array.size for array in p])[:-1]
    return [part.reshape(array.shape) for part, array in zip(np.split(flat, edges), p, strict=True)] if p else []


def _token_rows(
    keys: dict[str, Any], counts: np.ndarray, opened: np.ndarray, q_values: np.ndarray, tokenizer: Any
) -> pd.DataFrame:
    """The rows of one site: heads in order, the tokens of a head with the largest lift first."""
    token, head = np.nonzero(q_values < CHANCE)
    rate = opened[..., 0].sum(0) / counts[:, 1].sum()
    run = TokenRun(counts[token, 1], opened[token, head, 0], rate[head], q_values[token, head])
    ids = counts[token, 0].astype(np.int64)
    names = {int(token_id): token_text(tokenizer, int(token_id)) for token_id in np.unique(ids)}
    rows = keys | {"head": head, "token_id": ids, "token": [names[int(token_id)] for token_id in ids]}
    table = pd.DataFrame(rows | {name: column.compute(run) for name, column in RUN_COLUMNS["switch_tokens"].items()})
    order = [*(name for name in keys if name != "module"), "head", "module"]
    table = table[[*order, *(name for name in table if name not in order)]]
    return table.sort_values(["head", "lift", "token_id"], ascending=[True, False, True], ignore_index=True)


def _joined(frames: list[pd.DataFrame], domains: list[Domain], types: dict[str, str], table: str) -> pd.DataFrame:
    """All frames in one; where there is no row, an empty table with the same columns."""
    if frames:
        return pd.concat(frames, ignore_index=True).astype(types)
    keys = ["stream", "layer", *(["head"] if table == "switch_tokens" else []), "module"]
    names = [*domain_key(domains, domains[0]), *keys, *types, *RUN_COLUMNS[table]]
    empty = pd.DataFrame({name: pd.Series(dtype="float64") for name in dict.fromkeys(names)})
    kinds = {"stream": "object", "layer": "int64", "head": "int64", "module": "object", "domain": "object"} | types
    return empty.astype({name: kind for name, kind in kinds.items() if name in empty})
