"""Cosines of the first token with all others above 0: our reading of figure 1, not the proposition."""

from __future__ import annotations

import pandas as pd

from sinkscope.claims.claim import Claim, Found, Number, Rule, correlation, number, share
from sinkscope.claims.evidence import NO_PROBABILITIES, TOO_SHORT, Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject

SINKING = 0.05
"""A head has sink rows from this share of its rows on."""


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    layers, heads = run.telling(run.need_layers("cos_first_input_min")), run.heads
    if layers.empty:
        return not_tested(TOO_SHORT)
    layers = layers[layers["stream"] != "cross"]  # its sink is a key of the encoder, its cosines are the decoder's
    sinking, calm = layers[layers["sink_heads"] > 0], layers[layers["sink_heads"] == 0]
    low = layers["cos_first_input_min"]
    figures = {
        "layers with a sink head": share(layers["sink_heads"] > 0),
        "residual stream: of these, smallest cosine above 0": share(sinking["cos_first_residual_min"] > 0),
        "mean `cos_first_input`": run.of_layers("cos_first_input"),
        "over layers: rank correlation of the smallest cosine with BOS mass": correlation(low, layers["mean_bos_mass"]),
    }
    if sinking.empty:
        return not_tested("no layer has a sink head", figures)
    aligned = heads.merge(layers[["module", "cos_first_input_min"]], on="module")
    rows = aligned[(aligned["sink_rows"] >= SINKING) & aligned["off_rate"].notna()]
    figures["heads with sink rows in aligned layers whose sink rows are off"] = share(
        (1 - head.sunk_not_off / head.sink_rows) >= 0.9 for head in rows[rows["cos_first_input_min"] > 0].itertuples()
    )
    if "alignment_openness" in heads:  # runs of 0.1 have no such column
        figures |= _dose(heads)
    return Found(share(sinking["cos_first_input_min"] > 0), share(calm["cos_first_input_min"] > 0), figures)


def _dose(heads: pd.DataFrame) -> dict[str, Number]:
    """Whether a head writes less in the rows of better aligned tokens: heads with sink rows, and all others."""
    rows = heads[heads["alignment_openness"].notna()]
    sunk = rows["sink_rows"] >= SINKING
    words = "better aligned rows write less (`alignment_openness` < 0)"
    return {
        f"heads with sink rows in which {words}": share(rows["alignment_openness"][sunk] < 0),
        f"other heads in which {words}": share(rows["alignment_openness"][~sunk] < 0),
        "median `alignment_openness` of heads with sink rows": number(float(rows["alignment_openness"][sunk].median())),
    }


CLAIM = Claim(
    name="cosines",
    paper="2605.08453",
    by="ours, after Lampert et al.",
    title="the first token's cosine with every other is above 0",
    says="In a head with a sink, the cosine of the first token with every other token is above 0.",
    source=(
        "our reading of figure 1 and of the word alignment. The paper's own construction of a sink has BOS "
        "orthogonal to all others, so that cosines above 0 are not necessary: a failure refutes this reading, not "
        "the paper."
    ),
    assumes="Per sequence the smallest cosine over positions, after the input norm; then the mean over sequences.",
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("share of layers with a sink head whose smallest cosine is above 0", 0.95, 0.5),
    contrast="the same of layers without a sink head",
    not_shown=(
        "W_Q and W_K stand between these embeddings and the scores. If heads with aligned embeddings are not off, "
        "this shows only that alignment alone does not make a switch."
    ),
    figure="alignment",
    place=3,
)
