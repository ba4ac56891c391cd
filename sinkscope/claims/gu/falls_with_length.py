"""The sink rate falls with the length of the text and with the threshold."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Number, Rule, number, ratio
from sinkscope.claims.evidence import EPSILON, NO_PROBABILITIES, Evidence, not_tested
from sinkscope.claims.gu.first_token import rate
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject
from sinkscope.runs.per_sequence import tokens_of

TWICE = 128
"""Tokens that every sequence has at least: a shorter one is nearly its own first 64. Which of its sequences are longer,
no run says."""


def find(run: Evidence, subject: Subject) -> Found:
    rows = run.sequences[run.sequences["head"].notna()]
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    tokens, shortest = tokens_of(run.data), run.data.shortest or run.data.seq_len
    if "sink_score_t64" not in rows or rows["sink_score_t64"].isna().all() or shortest < TWICE:
        text = "the text" if shortest == run.data.seq_len else "the shortest text"
        return not_tested(f"{text} has {shortest} tokens, and {TWICE} are needed to compare it with its first 64")
    rows = rows[rows["sink_score_t64"].notna()]
    short, whole = (rate(rows, name) for name in ("sink_score_t64", "sink_score"))
    figures: dict[str, Number] = {"sink rate, T = 64": short, f"sink rate, T = {tokens}": whole}
    figures |= {f"the same, epsilon {epsilon}": rate(rows, "sink_score", epsilon) for epsilon in (0.2, 0.5, 0.8)}
    curve = run.rows_of_text(run.run.length_curve)
    figures |= {
        f"mean alpha_0, T = {length}": number(float(points["sink_score"].mean()))
        for length, points in curve.groupby("length")
        if length <= shortest  # not all sequences have a longer prefix
    }
    if not short.value:
        return not_tested("no head has a sink at T = 64", figures)
    sinks = [(rows[name] > EPSILON).groupby(rows["sequence"]).mean() for name in ("sink_score", "sink_score_t64")]
    return Found(ratio(*sinks), number(_by_threshold(figures, whole)), figures)


def _by_threshold(figures: dict[str, Number], whole: Number) -> float:
    return figures["the same, epsilon 0.8"].value / whole.value if whole.value else float("nan")


CLAIM = Claim(
    name="falls-with-length",
    paper="2410.10781",
    by="Gu et al.",
    title="the sink rate falls with length and threshold",
    says="Longer texts and larger thresholds have smaller sink rates.",
    source="section 3 and its tables of thresholds and lengths.",
    assumes="All lengths are prefixes of one text.",
    needs=TEXT,
    find=find,
    rule=Rule("sink rate of the whole text / sink rate of its first 64 tokens, epsilon 0.3", 0.9, 1.0),
    contrast="sink rate at epsilon 0.8 / sink rate at epsilon 0.3, whole text",
    not_shown=(
        "A sink rate means nothing without its T and epsilon. In texts longer than a sliding window, the window "
        "hides the first token from later queries."
    ),
    place=2,
)
