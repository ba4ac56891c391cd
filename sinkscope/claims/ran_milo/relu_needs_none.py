"""ReLU attention solves the trigger task without a sink."""

from __future__ import annotations

from sinkscope.claims.claim import Claim, Found, Rule, mean
from sinkscope.claims.evidence import not_tested
from sinkscope.claims.needs import TASK, Solved
from sinkscope.claims.ran_milo.softmax_needs_a_sink import largest_mass, task_figures, unlike_the_task
from sinkscope.claims.subject import Subject


def find(model: Solved, subject: Subject) -> Found:
    figures = task_figures(model)
    if not model.relu:
        return not_tested(f"the claim is about ReLU attention, not {model.config.attention}", figures)
    if reason := unlike_the_task(model):
        return not_tested(reason, figures)
    shares = [row["share_mean"] for row in model.result.heads]
    return Found(largest_mass(model), mean([max(shares)]), figures)


CLAIM = Claim(
    name="relu-needs-none",
    paper="2603.11487",
    by="Ran-Milo",
    title="ReLU attention solves it with no sink",
    says="ReLU attention solves the same task without a sink: normalisation is the fundamental driver.",
    source="abstract.",
    assumes=(
        "The paper names ReLU. So the claim is not tested on other scores without normalisation, such as an "
        "exponential or a sigmoid, nor on ReLU divided by its sum. ReLU is divided by the position."
    ),
    needs=TASK,
    find=find,
    rule=Rule("largest unnormalised weight of BOS in a head, over rows without a trigger", 0.1, 0.5),
    contrast="largest share of BOS in the row's sum, of a head (0 in a row of zeros)",
    not_shown=(
        "Whether the sum alone makes the difference: `sinkscope trigger necessity --group normalisation` turns it on "
        "and off. A ReLU model that has a sink does not show that it needed one."
    ),
    causal=True,
    place=2,
)
