"""Heads of language models that act at few tokens are to rest on a sink, as the trigger task's do."""

from __future__ import annotations

import numpy as np
import pandas as pd

from sinkscope.claims.claim import Claim, Found, Number, Rule, number, share
from sinkscope.claims.evidence import NO_PROBABILITIES, Evidence, head_name, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject
from sinkscope.runs.per_sequence import sequences_of

OFTEN = 0.3
"""A head acts at few tokens where it is off in this share of its rows. Below it no token could double the share of rows
in which a head is on, nor come near to it."""


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    heads = run.need("off_rate", "off_not_sunk", "sink_rows")
    resting = heads[heads["off_rate"] >= OFTEN]
    top = heads.loc[heads["off_rate"].idxmax()]
    figures = {
        f"heads that are off in {100 * OFTEN:.0f} % of their rows": share(heads["off_rate"] >= OFTEN),
        "heads that are off in 0.1 % of their rows": share(heads["off_rate"] >= 0.001),
        "the head that is off most": head_name(top),
        "its `off_rate`": run.of_head(top, "off_rate"),
        "its `sink_rows`": run.of_head(top, "sink_rows"),
        "its `off_not_sunk`": run.of_head(top, "off_not_sunk"),
        "largest odds ratio of a token that switches such a head on": _odds(run, resting),
    }
    if resting.empty:
        told = f"the largest `off_rate` is {top['off_rate']:.3f}, of head {top['layer']}.{top['head']}"
        return not_tested(f"no head is off in {100 * OFTEN:.0f} % of its rows ({told})", figures)
    off, sunk_too = resting["off_rate"].sum(), (resting["off_rate"] - resting["off_not_sunk"]).sum()
    others = (resting["sink_rows"] - (resting["off_rate"] - resting["off_not_sunk"])).sum()
    on = (1 - resting["off_rate"]).sum()
    return Found(number(sunk_too / off), number(others / on if on else np.nan), figures)


def _odds(run: Evidence, resting: pd.DataFrame) -> Number:
    """The odds that the head is on at the token, over those at all its other rows, with a 95 % interval (Woolf's, 0.5
    added to each count). Missing where no token of these heads passed the test of switch_tokens.csv, and where the
    sequences are not alike in length: a run does not tell how many rows they have together."""
    equal = run.data.shortest in (None, run.data.seq_len)
    if "switch_tokens" not in run.run.measured or resting.empty or not equal:
        return Number("-")
    tokens = run.of_text("switch_tokens").merge(resting[["module", "head", "off_rate"]], on=["module", "head"])
    tokens = tokens[tokens["lift"] > 1]
    if tokens.empty:
        return Number("-")
    rows = sequences_of(run.run, run.data) * (run.data.seq_len - 1)
    on = (tokens["on_rate"] * tokens["n"]).to_numpy()
    all_on = ((1 - tokens["off_rate"]) * rows).to_numpy()
    cells = np.stack([on, tokens["n"] - on, all_on - on, rows - tokens["n"] - (all_on - on)]).clip(min=0) + 0.5
    logs = np.log(cells[0] * cells[3] / (cells[1] * cells[2]))
    error = np.sqrt((1 / cells).sum(0))
    best = int(logs.argmax())
    low, value, high = np.exp(logs[best] + np.array([-1.96, 0, 1.96]) * error[best])
    return Number(f"{value:.3g}", float(value), float(low), float(high), n=int(tokens["n"].iloc[best]))


CLAIM = Claim(
    name="off-rests-on-a-sink",
    paper="2603.11487",
    by="ours, after Ran-Milo",
    title="heads that act at few tokens rest on a sink",
    says=(
        "The trigger task is meant as a model of heads in language models that do something at some tokens and "
        "nothing at others. If a model has such heads, they are off in many rows, and in these rows they are on the "
        "sink."
    ),
    source="our reading that the task is a model of such heads; we know of no measurement of this in a language model.",
    assumes="Off: the head writes less than a tenth of one value. On the sink: A[i,0] >= 0.9.",
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule(
        f"share of off rows that are on the sink, in heads that are off in at least {100 * OFTEN:.0f} % of their rows",
        0.9,
        0.1,
    ),
    contrast="share of the same heads' other rows that are on the sink",
    not_shown=(
        "Off means that the output of one head is small. A head may rest by writing a constant that later layers "
        "ignore."
    ),
    figure="switch",
    place=3,
)
