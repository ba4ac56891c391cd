"""Without normalisation no sink emerges."""

from __future__ import annotations

import numpy as np

from sinkscope.claims.claim import Claim, Found, Rule, number
from sinkscope.claims.evidence import EPSILON, NO_LANGUAGE, Evidence, not_tested
from sinkscope.claims.gu.first_token import rate
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject


def find(run: Evidence, subject: Subject) -> Found:
    figures = {"mean unnormalised weight on the first token": run.of_heads("bos_mass")}
    if not run.of_language:
        return not_tested(NO_LANGUAGE, figures)
    if others := sorted(run.scores - {"sigmoid"}):
        return not_tested(
            f"the claim is about sigmoid attention without normalisation, not {', '.join(others)}", figures
        )
    positions = run.rows_of_text(run.run.positions)
    shares = positions.loc[positions["position"] > 0, "bos_share"] if "bos_share" in positions else []
    return Found(rate(run.sequences, "bos_mass"), number(float(np.mean(shares))) if len(shares) else None, figures)


CLAIM = Claim(
    name="needs-normalisation",
    paper="2410.10781",
    by="Gu et al.",
    title="with sigmoid attention without normalisation no sink emerges",
    says=(
        "Sinks stem at least partly from softmax's normalisation: with sigmoid attention without normalisation "
        "none emerge in models of up to a billion parameters."
    ),
    source="abstract.",
    assumes=(
        "The abstract's words name sigmoid, so that no other score is put to the claim. A head has a sink in a "
        f"sequence where its mean unnormalised weight on the first token is above {EPSILON}; the share of the row says "
        "something else, and is the contrast."
    ),
    needs=TEXT,
    find=find,
    rule=Rule(
        "share of (sequence, head) pairs whose mean unnormalised weight on the first token is above 0.3", 0.05, 0.5
    ),
    contrast="the first token's share of a row's sum, mean over heads and queries",
    not_shown=(
        "An unnormalised weight has no common scale. The language models without normalisation of docs/training.md are "
        "small, and trained for 240 steps."
    ),
    place=6,
)
