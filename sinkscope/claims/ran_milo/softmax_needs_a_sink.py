"""One softmax layer that solves the trigger task puts its mass on an anchor; the stated falsifier is a model of it."""

from __future__ import annotations

from functools import cache

from sinkscope.claims.claim import Claim, Found, Number, Rule, mean, number, share
from sinkscope.claims.evidence import not_tested
from sinkscope.claims.needs import TASK, Solved, solved
from sinkscope.claims.subject import Subject


def find(model: Solved, subject: Subject) -> Found:
    figures = task_figures(model)
    if not model.plain_softmax:
        return not_tested(f"the claim is about softmax attention, not {model.config.attention}", figures)
    if reason := unlike_the_task(model):
        return not_tested(reason, figures)
    return Found(largest_mass(model), largest_mass(two_heads()), figures)


def unlike_the_task(model: Solved) -> str:
    """Why the model says nothing of the paper's task; empty where it solves it."""
    if model.other_task:
        return f"the claim is about the mean at the trigger and 0 elsewhere, not {model.other_task}"
    return "" if model.solved else f"the model does not solve the task (largest error {model.result.error:.3g})"


def task_figures(model: Solved) -> dict[str, Number]:
    """How well the task is solved, and where the mass goes."""
    masses = model.masses.mean(0)
    return {
        "largest error": number(model.result.error, 4),
        "heads with BOS mass >= 0.9 where no trigger stands": share(masses >= 0.9),
        "BOS mass there, smallest head": number(masses.min()),
        "BOS mass in the trigger's row, largest head": number(max(row["bos_trigger"] for row in model.result.heads)),
    }


def largest_mass(model: Solved) -> Number:
    """The BOS mass in rows without a trigger of the head that has most, with its error over sequences."""
    return mean(model.masses[:, model.masses.mean(0).argmax()])


@cache
def two_heads() -> Solved:
    """The two softmax heads, in closed form, that solve the task without a sink."""
    from sinkscope.trigger.explicit import explicit

    return solved(explicit("softmax", heads=2))


CLAIM = Claim(
    name="softmax-needs-a-sink",
    paper="2603.11487",
    by="Ran-Milo",
    title="a softmax that solves the trigger task has a sink",
    says=(
        "One softmax layer that writes the mean of all preceding tokens at the trigger, and exactly 0 elsewhere, "
        "must put its mass on a content-agnostic anchor. A softmax that solves the task without a sink in any head "
        "would refute this."
    ),
    source="abstract; theorems and falsifier as other readers report them.",
    assumes=(
        "A head has a sink if its mean BOS mass over rows without a trigger is 0.9 or more. The mean at the trigger "
        "is that of x_1 .. x_j, which includes the trigger's own token."
    ),
    needs=TASK,
    find=find,
    rule=Rule("largest BOS mass of a head, over rows without a trigger", 0.9, 0.5),
    contrast="the same of two softmax heads in closed form, which solve the task: necessary for one head, not for two",
    not_shown=(
        "A trained model with a sink does not show that the sink was needed. Two heads whose values cancel need "
        "none, and training still finds sinks there."
    ),
    causal=True,
    place=1,
)
