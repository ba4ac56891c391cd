"""Two softmax heads that need no sink cancel each other: is that seen?"""

from __future__ import annotations

from functools import cache

from sinkscope.claims.claim import Claim, Found, Number, Rule, number, share
from sinkscope.claims.evidence import Evidence, not_tested
from sinkscope.claims.needs import TEXT
from sinkscope.claims.subject import Subject

CANCELLING = 0.9


def find(run: Evidence, subject: Subject) -> Found:
    layers = run.need_layers("compensation", "compensation_unrelated")
    layers = layers[layers["heads"] > 1]
    if layers.empty:
        return not_tested("no layer has several heads")
    ratio = layers["compensation"] / layers["compensation_unrelated"]
    figures = {
        "layers whose heads cancel (10 % below orthogonal heads)": share(ratio < CANCELLING),
        "mean `compensation`": run.of_layers("compensation"),
        "mean `compensation_unrelated`": run.of_layers("compensation_unrelated"),
        "in layer": Number(str(layers.loc[ratio.idxmin(), "layer"])),
    }
    return Found(number(ratio.min()), number(two_heads()), figures)


@cache
def two_heads() -> float:
    """The same of the two softmax heads that solve the trigger task in closed form, without a sink."""
    from sinkscope.engine.scan import scan
    from sinkscope.trigger.explicit import explicit

    model = explicit("softmax", heads=2)
    layers = scan(model, num_sequences=50, measure="switch", spectra=0, self_check=False).layers
    return float((layers["compensation"] / layers["compensation_unrelated"]).iloc[0])


CLAIM = Claim(
    name="heads-compensate",
    paper="2603.11487",
    by="a machine-written review of Ran-Milo",
    title="several heads may compensate each other",
    says="A softmax of several heads may solve the task without a sink if one head writes what another takes back.",
    source="a machine-written review, with a simulated rebuttal; neither the paper's authors nor its referees.",
    assumes="Heads cancel where what they write together is 10 % or more below what orthogonal heads would write.",
    needs=TEXT.with_tables("switch"),
    find=find,
    rule=Rule("smallest `compensation` / `compensation_unrelated` of a layer", 0.5, CANCELLING),
    contrast="the same of two softmax heads in closed form, which solve the trigger task so",
    not_shown=(
        "Norms of a whole row say nothing of single directions: two heads may cancel in one and agree in others. "
        "Heads of different layers were not compared."
    ),
    place=4,
)
