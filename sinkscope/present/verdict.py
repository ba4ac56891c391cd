"""Words on a verdict that its screens and its page share: what moved, where it begins, how far beyond its bound."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.numbers import signed, significant
from sinkscope.present.text import printable

if TYPE_CHECKING:
    from sinkscope.comparison.policy import Rule
    from sinkscope.comparison.verdict import Breach, Verdict


def where(verdict: Verdict) -> list[str]:
    """The first layer that moved, what moved in it, how many heads moved in all, and the worst place."""
    breaches = verdict.breaches
    layers = [breach.layer for breach in breaches if breach.layer is not None]
    if not layers:
        return []
    first = min(layers)
    metrics = dict.fromkeys(breach.metric for breach in breaches if breach.layer == first)
    places = {(each.domain, each.stream, each.layer, each.head) for each in breaches if each.head is not None}
    worst = by_size([each for each in breaches if each.layer is not None])[0]
    heads = (
        f"{len(places)} head{'s' * (len(places) != 1)} moved in {len(set(layers))} layer{'s' * (len(set(layers)) != 1)}"
    )
    return [
        f"first moved: layer {first} ({', '.join(metrics)}); {heads}",
        f"worst: {worst.metric} at {printable(worst.place)}{times_allowed(worst)}",
    ]


def times_allowed(breach: Breach) -> str:
    """How often the change holds what is allowed; nothing where a value is missing or nothing is allowed."""
    if breach.baseline is None or breach.now is None:
        return ", where a value is missing on one side"
    if not breach.allowed:
        return ""
    times = abs(breach.now - breach.baseline) / breach.allowed
    return f", {times:.2g} times the allowed change" if times < 100 else f", {times:,.0f} times the allowed change"


def headline(verdict: Verdict) -> str:
    """`passed: ...` or `FAILED: ...` with the counts."""
    places = sum(tally.places for tally in verdict.tallies)
    rules = len(verdict.tallies)
    model, base = printable(verdict.model), printable(verdict.baseline_model)
    if verdict.passed:
        return f"passed: {model} against {base}: {rules} rules, {places} comparisons, nothing moved too far"
    failed = sum(bool(tally.breaches) for tally in verdict.tallies)
    return (
        f"FAILED: {model} against {base}: {len(verdict.breaches)} of {places} comparisons moved too far "
        f"({failed} of {rules} rules)"
    )


def by_size(breaches: list[Breach]) -> list[Breach]:
    """Sorts breaches by how far they are beyond their bound, farthest first; those with a missing value come before."""

    def size(breach: Breach) -> float:
        if breach.baseline is None or breach.now is None:
            return float("-inf")
        return -abs(breach.now - breach.baseline) / max(breach.allowed, 1e-30)

    return sorted(breaches, key=size)


def describe(breach: Breach, several: bool = False) -> str:
    """One line: metric, place, value in the baseline, value now, allowed change."""
    where = printable(f"{breach.place} on {breach.domain}" if several else breach.place)
    text = f"{breach.metric} at {where}: {significant(breach.baseline)} -> {significant(breach.now)}"
    if breach.baseline is None or breach.now is None:
        return f"{text} (a value is missing on one side)"
    text += f" ({signed(breach.now - breach.baseline)}, allowed ±{significant(breach.allowed)}"
    return text + (f", q {breach.q:.1g})" if breach.q is not None else ")")


def allowed_by(rule: Rule) -> str:
    """The rule's own bounds; where both are given the larger one holds. Rounding of the dtypes is added to them."""
    bounds = [] if rule.max_change is None else [f"±{significant(rule.max_change)}"]
    bounds += [] if rule.max_relative_change is None else [f"±{100 * rule.max_relative_change:g} %"]
    return " or ".join(bounds)
