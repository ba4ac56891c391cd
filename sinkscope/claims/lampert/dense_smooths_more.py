"""The condition under which dense attention makes tokens more similar than sparse attention."""

from __future__ import annotations

import pandas as pd

from sinkscope.claims.claim import Claim, Found, Number, Rule, number, share
from sinkscope.claims.evidence import Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject


def find(run: Evidence, subject: Subject) -> Found:
    changes = ["uniform_minus_attention", "attention_minus_identity"]
    run.need(*changes, "beta_tr_bw")
    table = run.of_text("smoothing").dropna(subset=["verdict", *changes])
    by = {name: table[table["verdict"] == name] for name in ("smooths", "sharpens", "neither")}
    figures = {"heads that should smooth (beta tr(BW) > 0)": share(table["verdict"] == "smooths")}
    figures |= _signs("uniform attention makes tokens more similar than the head's own", "uniform_minus_attention", by)
    figures |= _signs("the head's own makes tokens more similar than none", "attention_minus_identity", by)
    figures["heads whose cosines are positive under all three, as the paper assumes"] = share(
        (table[["avgcos_identity", "avgcos_attention", "avgcos_uniform"]] > 0).all(axis=1)
    )
    if "spread_path" in table:  # runs of 0.1 have no such column
        figures |= _walked(by)
    if by["smooths"].empty:
        return not_tested("no head meets the condition", figures)
    others = pd.concat([by["sharpens"], by["neither"]])
    return Found(
        share(by["smooths"]["uniform_minus_attention"] > 0), share(others["uniform_minus_attention"] > 0), figures
    )


def _signs(words: str, column: str, by: dict[str, pd.DataFrame]) -> dict[str, Number]:
    """How many heads of each condition have a value above 0."""
    named = {"smooths": "should smooth", "sharpens": "should sharpen", "neither": "meet neither condition"}
    figures = {f"{words}, of heads that {named[name]}": share(rows[column] > 0) for name, rows in by.items()}
    all_rows = pd.concat(by.values())
    return figures | {f"{words}, median": number(float(all_rows[column].median()), 6)}


def _walked(by: dict[str, pd.DataFrame]) -> dict[str, Number]:
    """How many heads of each condition go the way that the derivatives say, from own values to uniform attention."""
    named = {
        "smooths": ("falls all along, of heads that should smooth", "falls"),
        "sharpens": ("rises all along, of heads that should sharpen", "rises"),
        "neither": ("falls, then rises, of heads that meet neither condition", "turns"),
    }
    figures = {
        f"from each token's own value to uniform attention the spread {words}": share(by[name]["spread_path"] == path)
        for name, (words, path) in named.items()
    }
    for name, words, sign in (("smooths", "rises in both halves, of heads that should smooth", 1),
                              ("sharpens", "falls in both halves, of heads that should sharpen", -1)):  # fmt: skip
        walk = by[name][["avgcos_identity", "avgcos_half", "avgcos_uniform"]].diff(axis=1).iloc[:, 1:]
        figures[f"there the mean cosine {words}"] = share((sign * walk > 0).all(axis=1))
    return figures


CLAIM = Claim(
    name="dense-smooths-more",
    paper="2605.08453",
    by="Lampert et al.",
    title="dense attention smooths more, under a condition",
    says=(
        "Where beta tr(BW) > 0 the spread of tokens strictly falls towards dense attention; where beta tr(BW) + "
        "tr(BW^T W) < 0 it strictly rises. The first is often satisfied in practice."
    ),
    source="the derivatives D'_k(0) and D'_k(1); figures 8 and 9 by their captions.",
    assumes=(
        "On the path in lambda, attention goes from each token's own value to the mean of all that the token sees. "
        "The rule compares the end of this path with the head's own attention; the rows about the spread follow the "
        "path itself. Numerator and denominator of the cosine are positive."
    ),
    needs=TEXT.with_tables("smoothing"),
    find=find,
    rule=Rule(
        "of the heads with beta tr(BW) > 0, the share whose tokens are more similar under uniform attention than under "
        "their own",
        0.9,
        0.5,
    ),
    contrast="the same of all other heads",
    not_shown=(
        "The theorem speaks of uniform and sparse attention in expectation, not of the head's own pattern on one "
        "text. The condition is sufficient: other heads may smooth too."
    ),
    figure="smoothing",
    place=6,
)
