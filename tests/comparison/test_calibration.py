"""How often compare, check and domains raise an alarm where nothing differs, and how often intervals hold the truth.

Bounds are binomial limits: a rate at its nominal level passes them but once in 10,000 runs of a test. Seeds are printed
(pytest shows them where a test fails, and with -s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pandas as pd
import pytest
from conftest import Tell
from desk import scanned
from scipy.stats import binom
from tiers import slow_but

from sinkscope.capture import Site
from sinkscope.capture.sites import AttentionKind
from sinkscope.comparison.baseline import baseline_of
from sinkscope.comparison.gate import check
from sinkscope.comparison.levels import head_changes, level_rows
from sinkscope.comparison.policy import DEFAULT, Policy, Rule
from sinkscope.inputs import Corpus
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.per_sequence import domains, whole_numbers
from sinkscope.runs.run import Run
from sinkscope.runs.saved.arms_table import versus_random
from sinkscope.runs.statistics import Difference, equivalence, paired_difference, welch_difference
from sinkscope.tables.summary import contrast_table
from sinkscope.tables.values import Domain, SiteValues

LEVEL, RARE = 0.05, 1e-4
Draw = Callable[[np.random.Generator, tuple[int, int]], np.ndarray]

SHARES: dict[str, tuple[Draw, Draw, float]] = {
    "normal": (lambda g, size: g.normal(0, 1, size), lambda g, size: g.normal(1, 1, size), 1.0),
    "shares near 0": (lambda g, size: g.beta(0.5, 9.5, size), lambda g, size: g.beta(0.5, 9.5, size), 0.0),
    "shares near 1": (lambda g, size: g.beta(19, 1, size), lambda g, size: g.beta(8, 2, size), -0.15),
    "exponential differences": (lambda g, size: np.zeros(size), lambda g, size: g.exponential(1, size), 1.0),
}
"""Two distributions of per-sequence values, and the difference of their means."""

FLOORS = {"normal": 0.94, "shares near 0": 0.92, "shares near 1": 0.92, "exponential differences": 0.86}
"""The least coverage at any size from 4 to 32, for a nominal 0.95; Student's t is known to fall short where the
difference itself is as skewed as an exponential."""


def most_alarms(trials: int, rate: float = LEVEL) -> int:
    """The number of alarms that `trials` independent ones at their nominal rate exceed once in 10,000 times."""
    return int(binom.isf(RARE, trials, rate))


def leaves_out(found: Difference, truth: float) -> np.ndarray:
    return (found.low > truth) | (found.high < truth)


def difference(a: np.ndarray, b: np.ndarray, paired: bool) -> Difference:
    return paired_difference(a, b) if paired else welch_difference(a, b)


@pytest.mark.parametrize("draws", slow_but([4_000, 100_000], 4_000))
def test_coverage_of_the_95_percent_interval(draws: int, tell: Tell) -> None:
    """Prints the table of coverage: kinds of values down, numbers of sequences across."""
    seed, counts = 11, (4, 8, 16, 32)
    noise = np.random.default_rng(seed)
    tell(f"coverage in % of {draws} intervals, seed {seed}: {', '.join(map(str, counts))} sequences")
    for name, (first, second, truth) in SHARES.items():
        for paired in (True, False):
            shares = []
            for count in counts:
                a, b = first(noise, (count, draws)), second(noise, (count, draws))
                shares.append(1 - leaves_out(difference(a, b, paired), truth).mean())
            shown = " ".join(f"{100 * share:5.1f}" for share in shares)
            tell(f"{name:24} {'paired' if paired else 'Welch':6} {shown}")
            allowed = draws - most_alarms(draws, 1 - FLOORS[name])
            assert min(shares) * draws >= allowed, (name, paired, shares)


RATES = ((0.5, 0.5), (0.9, 0.9), (0.05, 0.05), (0.1, 0.9), (0.05, 0.95), (0.9, 0.7))
"""Shares of sequences whose value is 1, in two runs."""


@pytest.mark.parametrize("paired", [True, False])
def test_coverage_where_values_are_0_or_1(paired: bool, tell: Tell) -> None:
    """No equal samples prove a difference, or that there is none; at 4 sequences no p is below that of a check."""
    seed, draws, counts = 12, 4_000, (4, 8, 16, 32)
    noise, tested = np.random.default_rng(seed), paired_difference if paired else welch_difference
    tell(f"coverage in % of {draws} intervals, seed {seed}: {', '.join(map(str, counts))} sequences")
    for first, second in RATES:
        shares = []
        for count in counts:
            a, b = ((noise.random((count, draws)) < share).astype(float) for share in (first, second))
            found = tested(a, b, whole_numbers=True)
            shares.append(1 - leaves_out(found, second - first).mean())
            constant = (a == a[0]).all(0) & (b == b[0]).all(0)
            assert (found.sem[constant] > 0).all()
            assert count > 4 or (found.p >= DEFAULT.significance).all()
            assert (equivalence(found, 0.5 / count)[constant] > LEVEL).all()
        tell(f"{first:4} and {second:4} {'paired' if paired else 'Welch':6} "
             f"{' '.join(f'{100 * share:5.1f}' for share in shares)}")  # fmt: skip
        assert min(shares) > 0.80, (first, second, shares)


def test_check_takes_no_few_equal_sequences_for_a_proof() -> None:
    """A rate of 0 of 3 and one of 3 of 3: without an error of their own they differed by q = 0."""
    then, now = scanned(), scanned(text=1)
    for run, value in ((then, 0.0), (now, 1.0)):
        table = run.sequences[run.sequences["sequence"] < 3]
        run.sequences = table.assign(sink_rate=table["sink_rate"].where(table["head"].isna(), value))
    rule = Rule(metric="sink_rate", level="head", max_change=0.1)
    verdict = check(now, baseline_of(then), Policy(rules=[rule]))
    assert verdict.passed
    assert verdict.tallies[0].largest == 1.0
    rows = level_rows(then, now, (domains(then)[0].domain,) * 2 + (None,), "head", ["sink_rate"], False)
    assert rows["sem"].to_numpy() == pytest.approx(2**0.5 / 4)
    assert (rows["low"] < rows["difference"]).all()


@pytest.mark.parametrize(("metric", "level"), [("sinks_per_sequence", "head"), ("massive_tokens", "layer")])
def test_a_few_equal_counts_are_no_proof(metric: str, level: str) -> None:
    then, now = scanned(), scanned(text=1)
    for run, value in ((then, 1.0), (now, 2.0)):
        table = run.sequences[run.sequences["sequence"] < 3]
        run.sequences = table.assign(**{metric: table[metric].where(table[metric].isna(), value)})
    rows = level_rows(then, now, (domains(then)[0].domain,) * 2 + (None,), level, [metric], False)
    assert rows["sem"].to_numpy() == pytest.approx(2**0.5 / 4)
    assert (rows["p"] > 0.01).all()
    assert not whole_numbers(metric, "summary")
    assert not whole_numbers("sink_score", "head")


@pytest.mark.parametrize("draws", slow_but([4_000, 100_000], 4_000))
@pytest.mark.parametrize("paired", [True, False])
@pytest.mark.parametrize("count", [4, 8, 16, 32])
def test_an_unchanged_head_is_left_out_in_one_of_twenty(count: int, paired: bool, draws: int) -> None:
    """Both samples from one distribution. Exact for paired normal values; skew makes the tests more careful."""
    noise = np.random.default_rng(count)
    for name in ("normal", "shares near 0", "shares near 1"):
        draw = SHARES[name][0]
        found = difference(draw(noise, (count, draws)), draw(noise, (count, draws)), paired)
        alarms = int(leaves_out(found, 0.0).sum())
        assert alarms <= most_alarms(draws), (name, alarms / draws)
        assert alarms == int((found.p < LEVEL).sum())
        if name == "normal" and paired:
            assert alarms >= binom.ppf(RARE, draws, LEVEL)


@pytest.mark.parametrize("trials", slow_but([300, 2_500], 300))
@pytest.mark.parametrize(("draws", "floor"), slow_but([(2, 0.87), (5, 0.94)], (5, 0.94)))
def test_coverage_beside_random_draws(draws: int, floor: float, trials: int, tell: Tell) -> None:
    """Losses of 16 sequences under an arm and under random draws, which differ by `spread` from each other."""
    seed, truth = 13, 0.5
    noise = np.random.default_rng(seed)
    for spread in (0.0, 0.1, 0.4, 1.0):
        held = 0
        for _ in range(trials):
            text = noise.normal(2, 1, 16)
            arm = text + truth + noise.normal(0, 0.2, 16)
            control = text + noise.normal(0, spread, (draws, 1)) + noise.normal(0, 0.3, (draws, 16))
            held += not leaves_out(versus_random(arm, control), truth)
        tell(f"{draws} draws, spread {spread}, seed {seed}: {100 * held / trials:.1f} % of {trials} intervals")
        assert held >= trials - most_alarms(trials, 1 - floor)


def simulated(seed: int, count: int, paired: bool) -> Iterator[tuple[Run, Run]]:
    """`count` pairs of runs whose values of a place come from one distribution, as skewed as BOS mass is.

    Unpaired runs have another fingerprint, as over other text.
    """
    noise = np.random.default_rng(seed)
    runs = scanned(), scanned()
    names = list(dict.fromkeys(["sink_score", *(rule.metric for rule in DEFAULT.rules)]))
    table = runs[0].sequences
    means = table.groupby(table["layer"] * 100 + table["head"].fillna(99))[names].transform("mean")
    if not paired:
        runs[1].manifest.data[0].fingerprint = "other text"
    for _ in range(count):
        for run in runs:
            run.sequences[names] = means * (1 + 0.05 * (noise.exponential(1, means.shape) - 1))
        yield runs


def resampled(seed: int, count: int) -> Iterator[tuple[Run, Run]]:
    """`count` pairs of runs of 8 sequences each, dealt from 32 sequences that one model really was scanned over."""
    noise = np.random.default_rng(seed)
    dealt = scanned(), scanned(text=1)
    pool = pd.concat(
        [scanned(text=text).sequences.assign(sequence=lambda rows, text=text: rows["sequence"] + 8 * text)
         for text in range(4)]
    )  # fmt: skip
    for _ in range(count):
        order = noise.permutation(32)
        for run, chosen in zip(dealt, (order[:8], order[8:16]), strict=True):
            kept = pool[pool["sequence"].isin(chosen)]
            numbers = {old: new for new, old in enumerate(chosen)}
            run.sequences = kept.assign(sequence=kept["sequence"].map(numbers)).sort_values("sequence", kind="stable")
        yield dealt


def swapped(seed: int, count: int) -> Iterator[tuple[Run, Run]]:
    """`count` pairs of runs over the same 8 sequences, of a model and its noisy copy, whose places are dealt by coin.

    So neither run is of one model, and no difference has a sign.
    """
    noise = np.random.default_rng(seed)
    first, second = scanned(), scanned("noise")
    tables = first.sequences, second.sequences
    for _ in range(count):
        turned = tables[0]["sequence"].isin(np.flatnonzero(noise.random(8) < 0.5))
        first.sequences = tables[0].where(~turned, tables[1])
        second.sequences = tables[1].where(~turned, tables[0])
        yield first, second


def head_alarms(pairs: Iterator[tuple[Run, Run]], paired: bool) -> tuple[int, int, int, int]:
    """Heads tested, heads whose interval leaves out 0, runs with a q < 0.05, runs that list a change of state."""
    heads = out = runs = changed = 0
    for a, b in pairs:
        place = (domains(a)[0].domain, domains(b)[0].domain, None)
        rows = level_rows(a, b, place, "head", ["bos_mass"], paired)
        known = rows["p"].notna() & (rows["difference"] != 0)
        heads += int(known.sum())
        out += int(((rows["low"] > 0) | (rows["high"] < 0))[known].sum())
        runs += bool((rows["q"] < LEVEL).any())
        changed += any(head_changes(a, b, [place], paired).held.values())
    return heads, out, runs, changed


FEW = ("simulated, paired", 12)
KINDS = ("simulated, paired", "simulated, Welch", "resampled, Welch", "swapped, paired")


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), slow_but([FEW, *((kind, 100) for kind in KINDS)], FEW))
def test_false_alarms_of_compare(kind: str, count: int, tell: Tell) -> None:
    """Heads of one run share its sequences: their limit counts runs, not heads, unless they were drawn apart."""
    seed, paired = 21, kind.endswith("paired")
    source = {
        "simulated": lambda: simulated(seed, count, paired),
        "resampled": lambda: resampled(seed, count),
        "swapped": lambda: swapped(seed, count),
    }[kind.partition(",")[0]]
    heads, out, runs, changed = head_alarms(source(), paired)
    tell(f"{kind}, seed {seed}: {out} of {heads} intervals leave out 0, {runs} of {count} runs have a q < 0.05, "
          f"{changed} list a change")  # fmt: skip
    assert heads >= 8 * count
    independent = heads if kind.startswith("simulated") else count
    assert out / heads <= most_alarms(independent) / independent
    assert runs <= most_alarms(count)
    assert changed <= most_alarms(count, 2 * LEVEL), "sinks and dormancy are two families"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [(simulated, 60), (resampled, 60)])
def test_false_alarms_of_check(kind: Callable[..., Iterator[tuple[Run, Run]]], count: int, tell: Tell) -> None:
    """Over other text: the built-in policy fails one run in a thousand at most, one that allows nothing 5 %."""
    seed, failed, strict_failed = 31, 0, 0
    strict = Policy(
        significance=LEVEL,
        rules=[Rule(metric=rule.metric, level=rule.level, max_change=0.0) for rule in DEFAULT.rules],
    )
    pairs = kind(seed, count, False) if kind is simulated else kind(seed, count)
    for a, b in pairs:
        baseline = baseline_of(a)
        verdict = check(b, baseline)
        assert not any(verdict.same_text.values())
        failed += not verdict.passed
        strict_failed += not check(b, baseline, strict).passed
    tell(
        f"{kind.__name__}, seed {seed}: {failed} of {count} fail the built-in policy, "
        f"{strict_failed} one that allows nothing"
    )
    assert failed <= most_alarms(count, DEFAULT.significance)
    assert strict_failed <= most_alarms(count)


def drawn_domain(name: str, values: np.ndarray, same_text: bool) -> Domain:
    """A domain whose BOS mass is `values`, [sequence, head]; documents of one name, of one text if asked."""
    declared = quantity_set()
    names = declared.metrics.names("heads")
    heads = np.zeros((*values.shape, len(names)))
    heads[:, :, names.index("bos_mass")] = values
    count = len(values)
    corpus = Corpus(name, np.zeros((count, 4), int), [(f"x:{n}",) for n in range(count)],
                    source="x.jsonl" if same_text else f"{name}/x.jsonl")  # fmt: skip
    return Domain(corpus, {"attention": SiteValues(declared, {"heads": heads}, [4], count, True, 4, 4)})


@pytest.mark.slow
@pytest.mark.parametrize("count", slow_but([50, 1_000], 50))
@pytest.mark.parametrize("paired", [True, False])
def test_false_alarms_of_domains(paired: bool, count: int, tell: Tell) -> None:
    """Two domains of 8 sequences and 40 heads, whose BOS mass comes from one distribution near 0."""
    seed, out, differing, alarmed = 41, 0, 0, 0
    noise = np.random.default_rng(seed)
    site = Site(
        "text", 0, "attention", 0, AttentionKind("full"), 40, 40, 1, 1, causal=True, block=None, projection=None
    )
    for _ in range(count):
        drawn = [drawn_domain(name, noise.beta(0.5, 9.5, (8, 40)), paired) for name in "ab"]
        table = contrast_table(drawn, [site])
        assert (table["paired"] == paired).all()
        out += int(((table["low"] > 0) | (table["high"] < 0)).sum())
        differing += int(table["differs"].sum())
        alarmed += bool(table["differs"].any())
    tell(f"{'paired' if paired else 'Welch'}, seed {seed}: {out} of {40 * count} intervals leave out 0, "
          f"{differing} heads differ, in {alarmed} of {count} pairs")  # fmt: skip
    assert out <= most_alarms(40 * count)
    assert alarmed <= most_alarms(count)
