"""Proposition 4.1: a sink at 0 asks for one W with z_j^T W (z_0 - z_i) > 0 for all j of J and i != 0."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, correlation, number, share
from sinkscope.claims.evidence import NO_PROBABILITIES, TOO_SHORT, Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    layers = run.telling(run.need_layers("alignment_margin", "alignment_margin_other"))
    if layers.empty:
        return not_tested(TOO_SHORT)
    margins, sinking = run.least(layers, "alignment_margin"), layers["sink_heads"] > 0
    figures = {
        "layers with a sink head": share(layers["sink_heads"] > 0),
        "mean `alignment_margin`": run.of_layers("alignment_margin"),
        "mean `alignment_margin_other`": run.of_layers("alignment_margin_other"),
        "layers in which the first token's margin is the larger": share(
            layers["alignment_margin"] > layers["alignment_margin_other"]
        ),
        "smallest `alignment_margin` of a layer with a sink head": number(layers["alignment_margin"][sinking].min()),
        "over layers: rank correlation of the margin with BOS mass": correlation(
            layers["alignment_margin"], layers["mean_bos_mass"]
        ),
    }
    if (layers["alignment_margin_other"] > 0).all():
        return not_tested(
            "the condition excludes nothing: in every layer, such a W exists for another token too", figures
        )
    if not sinking.any():
        return not_tested("no layer has a sink head", figures)
    return Found(share(margins[sinking] > 0), share(margins[~sinking] > 0), figures)


CLAIM = Claim(
    name="alignment",
    paper="2605.08453",
    by="Lampert et al.",
    title="the sink's embedding can be aligned with all others",
    says=(
        "A sink at 0 for the queries in J asks for a W with z_j^T W (z_0 - z_i) > 0 for every j in J and i != 0: "
        "necessary alignment between the embedding of the sink and all other embeddings."
    ),
    source="proposition 4.1.",
    assumes=(
        "z is what the projections read, in one text at a time. A layer counts if such a W exists in each text. J is "
        "the set of all queries j >= 1. i is every other key, whether or not the query sees it."
    ),
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("share of layers with a sink head in which some W has a margin above 0", 0.95, 0.5),
    contrast="the same of layers without a sink head",
    not_shown=(
        "Linearly independent tokens always have such a W, and T <= D tokens mostly are linearly independent; "
        "longer texts may have one too. The condition for one text is weaker than for all texts. A causal head need "
        "not give the sink more than keys that a query does not see. W contains neither rotary positions nor norms "
        "of q and k."
    ),
    figure="alignment",
    place=2,
)
