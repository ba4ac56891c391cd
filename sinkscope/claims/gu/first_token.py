"""Language models sink into the first token, on any text."""

from __future__ import annotations

import pandas as pd

from sinkscope.claims.claim import Claim, Found, NotTested, Number, Rule, mean
from sinkscope.claims.evidence import EPSILON, NO_LANGUAGE, NO_PROBABILITIES, Evidence, not_tested
from sinkscope.claims.needs import CONTROLS, TEXT
from sinkscope.claims.subject import Subject
from sinkscope.runs.schema.manifest import FirstToken


def find(run: Evidence, subject: Subject) -> Found:
    if not run.of_language:
        return not_tested(NO_LANGUAGE)
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    rows, column = run.sequences, "sink_score_t64"
    on_controls = _on_controls(subject)
    if column not in rows or rows[column].isna().all():
        return not_tested(f"the text has {run.data.seq_len} tokens, and the claim is about the first 64", on_controls)
    figures = {"tokens, T": Number("64"), "mean alpha_0": run.of_heads(column)} | on_controls
    return Found(rate(rows, column), figures.get("sink rate on random tokens"), figures)


def _on_controls(subject: Subject) -> dict[str, Number]:
    """The same of random and repeated tokens, or why they were not measured."""
    try:
        controls = CONTROLS.of(subject)
    except NotTested as reason:
        return {"random and repeated tokens": Number(f"not measured: {reason}")}
    figures = {}
    for data in controls.run.manifest.data:
        sequences = controls.sequences_of(data.domain)
        figures[f"sink rate on {data.spec} tokens"] = rate(sequences, "sink_score")
        figures[f"mean alpha_0 on {data.spec} tokens"] = controls.of_heads("sink_score", data.domain)
        figures[f"the first token of {data.spec} tokens is BOS"] = _is_bos(data.first_token)
    return figures


def rate(rows: pd.DataFrame, column: str, epsilon: float = EPSILON) -> Number:
    """The sink rate: share of heads with alpha_0 above epsilon, for each sequence, with its error."""
    heads = rows[rows["head"].notna() & rows[column].notna()]
    return mean((heads[column] > epsilon).groupby(heads["sequence"]).mean())


def _is_bos(first: FirstToken | None) -> Number:
    bos = None if first is None else first.is_bos
    return Number("-" if bos is None else "yes" if bos else "no")


CLAIM = Claim(
    name="first-token",
    paper="2410.10781",
    by="Gu et al.",
    title="language models sink into the first token",
    says=(
        "The sink rate at T = 64 and epsilon = 0.3 is 77.00 % for GPT2-XL and 92.47 % for LLaMA2-7B on natural "
        "text, 70.29 % and 90.13 % on random tokens, 62.28 % and 0.00 % on one token repeated."
    ),
    source="table 1.",
    assumes="A sink rate of one half counts as sinking. Their texts are from the Pile.",
    needs=TEXT,
    also=(CONTROLS,),
    find=find,
    rule=Rule("sink rate on text, epsilon 0.3, T = 64", 0.5, 0.1),
    contrast="the sink rate on random tokens",
    not_shown="Whether the first token is BOS or another token makes a difference: see stays-at-the-first-position.",
    place=1,
)
