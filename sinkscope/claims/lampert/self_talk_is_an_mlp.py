"""A head that only talks to itself does to each token what an MLP could do."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, number, share
from sinkscope.claims.evidence import NO_PROBABILITIES, Evidence, head_name, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject

DIAGONAL, SILENT = 0.5, 0.05


def find(run: Evidence, subject: Subject) -> Found:
    if not run.normalised:
        return not_tested(NO_PROBABILITIES)
    heads = run.need("communication", "self_mass", "from_self")
    diagonal = heads[heads["self_mass"] >= DIAGONAL]
    least, most = heads.loc[heads["communication"].idxmin()], heads.loc[heads["self_mass"].idxmax()]
    figures = {
        "heads with `self_mass` of 0.5 or more": share(heads["self_mass"] >= DIAGONAL),
        "smallest `communication`": run.of_head(least, "communication"),
        "of head": head_name(least),
        "largest `self_mass`": run.of_head(most, "self_mass"),
        "head of that": head_name(most),
        "its `communication`": run.of_head(most, "communication"),
        "its `from_self`": run.of_head(most, "from_self"),
    }
    if diagonal.empty:
        told = f"the largest `self_mass` is {most['self_mass']:.3f}, of head {most['layer']}.{most['head']}"
        return not_tested(f"no head has half of its mass on its own token ({told})", figures)
    others = heads[heads["self_mass"] < DIAGONAL]
    return Found(
        number(float(diagonal["communication"].median())), number(float(others["communication"].median())), figures
    )


CLAIM = Claim(
    name="self-talk-is-an-mlp",
    paper="2605.08453",
    by="Lampert et al.",
    title="a head that only talks to itself is an MLP",
    says="A head with a diagonal pattern maps each token by itself, as an MLP does.",
    source="abstract.",
    assumes=(
        "A head talks to itself where its mean A[i,i] is 0.5 or more; it is an MLP where `communication`, the "
        "energy that it moves from other tokens than the first and its own, is below 5 % of all that it writes."
    ),
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("median `communication` of the heads with `self_mass` of 0.5 or more", SILENT, 0.5),
    contrast="the same of all other heads",
    not_shown=(
        "Energy does not measure usefulness: later layers may ignore what is moved, and a small part may matter most."
    ),
    place=5,
)
