"""The sink's value may not contribute: what does the model lose without it?"""

from __future__ import annotations

import pandas as pd

from sinkscope.claims.claim import Claim, Found, Number, Rule
from sinkscope.claims.evidence import EPSILON, NO_PROBABILITIES, TOO_SHORT, not_tested
from sinkscope.claims.needs import LOSSES, TEXT
from sinkscope.claims.subject import Subject


def find(arms: pd.DataFrame, subject: Subject) -> Found:
    figures = {
        "the first key hidden, increase": increase(arms, "keys:first1"),
        "another key hidden, increase": increase(arms, "keys:random1"),
    }
    run = TEXT.of(subject)
    if not run.normalised:
        return not_tested(NO_PROBABILITIES, figures)
    heads = run.telling(run.heads)
    if heads.empty:
        return not_tested(TOO_SHORT, figures)
    if not (heads["sink_score"] > EPSILON).any():
        return not_tested("no head has a sink", figures)
    return Found(increase(arms, "value:first1"), increase(arms, "value:random1"), figures)


def increase(arms: pd.DataFrame, arm: str) -> Number:
    """What an arm adds to the loss, in nats per token, with its standard error."""
    value, error = float(arms.loc[arm, "increase"]), float(arms.loc[arm, "increase_sem"])
    return Number(f"{value:.3f} ± {error:.3f}", value, sem=error)


CLAIM = Claim(
    name="value-is-not-needed",
    paper="2410.10781",
    by="Gu et al.",
    title="the sink's value does not contribute",
    says="Sinks act as key biases, which hold extra attention and may not contribute to the values.",
    source="abstract.",
    assumes="A value does not contribute where the loss does not rise without it.",
    needs=LOSSES,
    also=(TEXT,),
    find=find,
    rule=Rule("increase of the loss, in nats per token, with the first token's value set to 0 in all heads", 0.05, 0.5),
    contrast="the same with another token's value",
    not_shown=(
        "A value set to 0 in all heads at once is far from anything the model was trained on. It says that the "
        "model relies on the values, not which head does."
    ),
    causal=True,
    place=5,
)
