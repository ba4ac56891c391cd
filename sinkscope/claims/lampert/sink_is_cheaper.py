"""Section 7: weights of a sink against weights of a diagonal pattern of the same margin."""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy.stats import gmean

from sinkscope.claims.claim import Claim, Found, Number, Rule, number, share
from sinkscope.claims.evidence import Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject


def find(run: Evidence, subject: Subject) -> Found:
    margins = run.heads["sink_margin_pairs"].dropna() if "sink_margin_pairs" in run.heads else pd.Series(dtype=float)
    figures = {"heads whose first token leads every other key, on average": share(margins > 0)}
    if (margins <= 0).all() and len(margins):  # and then no head has a cost
        return not_tested("no head's first token leads every other key", figures)
    run.need("cost_sink_lower_qk", "cost_sink_upper_qk")
    table = run.of_text("smoothing").drop(columns=["stream", "layer"]).merge(run.heads[["module", "head", "bos_mass",
        "self_mass"]], on=["module", "head"])  # fmt: skip
    heads = table[(table["sink_margin_pairs"] > 0) & table["cheaper_qk"].notna()]
    if heads.empty:
        return not_tested("no head has both a margin above 0 and a cost", figures)
    figures |= {
        "`cost_diagonal_lower_qk` / `cost_sink_upper_qk`, geometric mean": _ratio(
            heads["cost_diagonal_lower_qk"] / heads["cost_sink_upper_qk"]
        ),
        "share of `cost_sink_upper_value` in the sink's upper bound": number(
            float(
                (heads["cost_sink_upper_value"] / (heads["cost_sink_upper_value"] + heads["cost_sink_upper_qk"])).mean()
            )
        ),
        "the paper's lower bound of the diagonal above the sink's upper term": share(
            heads["cost_diagonal_lower_paper"] > heads["cost_sink_upper_qk"]
        ),
        "`token_span`, mean": number(float(heads["token_span"].mean()), 1),
        "`cost_qk` of the heads themselves, mean": number(float(heads["cost_qk"].mean()), 1),
        "heads with `bos_mass` above 0.5": share(table["bos_mass"] > 0.5),
        "heads with `self_mass` above 0.5": share(table["self_mass"] > 0.5),
    }
    if "cheaper_groups" in heads:
        figures |= {
            "the deciding share with C as clusters (`token_groups`)": share(heads["cheaper_groups"].dropna() == "sink"),
            "heads whose first token leads, in layers whose tokens are one cluster": share(heads["token_groups"] == 1),
            "largest `token_groups`, mean of a layer": number(float(heads["token_groups"].max()), 1),
        }
    return Found(share(heads["cheaper_qk"] == "sink"), share(heads["cheaper_block"] == "sink"), figures)


def _ratio(values: pd.Series) -> Number:
    there = values[values > 0]
    return number(float(gmean(there)) if len(there) else np.nan, 1)


CLAIM = Claim(
    name="sink-is-cheaper",
    paper="2605.08453",
    by="Lampert et al.",
    title="a sink is cheaper than a diagonal pattern",
    says=(
        "The squared weights of a block with a sink are bounded below those of a block with a diagonal pattern of "
        "the same margin."
    ),
    source=(
        "section 7: the four bounds, the requirements and the diagonal's construction, whose cost as |W_Q|^2 + "
        "|W_K|^2 we have built and measured."
    ),
    assumes=(
        "Terms with kappa are the cost of queries and keys; r_eta + C is that of values and MLP. kappa is the "
        "head's own mean margin over each other key. C is 1, except in rows that name clusters. r_eta is the "
        "numerical rank of the tokens around their mean. The diagonal's lower bound is ours, 2 kappa / (s |B'|_2)."
    ),
    needs=TEXT.with_tables("smoothing"),
    find=find,
    rule=Rule(
        "share of the heads with `sink_margin_pairs` above 0 in which queries and keys of a sink are surely cheaper",
        0.9,
        0.1,
    ),
    contrast="the same with values and MLP counted, which no lower bound contains",
    not_shown=(
        "The bounds are for the smallest weights that could make a pattern, not for a head's own weights. The "
        "tokens of a text are not the paper's relaxed switch: there are no copy tokens, and nuisance and signal are "
        "not orthogonal."
    ),
    figure="costs",
    place=4,
)
