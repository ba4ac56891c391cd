"""A verdict as text: the words that screens and the page share, a terminal's, GitHub's, and those of JUnit readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.numbers import signed, significant
from sinkscope.present.text import markdown_cell, printable, wrapped

if TYPE_CHECKING:
    from sinkscope.comparison.gate import Breach, Tally, Verdict
    from sinkscope.comparison.policy import Rule


def where(verdict: Verdict) -> list[str]:
    """The first layer that moved, what moved in it, how many heads moved in all, and the worst place."""
    breaches = verdict.breaches
    placed = [breach for breach in breaches if breach.layer is not None]
    if not placed:
        return []
    first = first_layer(placed)
    metrics = dict.fromkeys(breach.metric for breach in placed if layer_of(breach) == first)
    layers = {layer_of(breach) for breach in placed}
    heads = {(*layer_of(breach), breach.head) for breach in placed if breach.head is not None}
    worst = by_size(placed)[0]
    of_heads = {layer_of(breach) for breach in placed if breach.head is not None}
    moved = [f"{_count(len(heads), 'head')} moved in {_count(len(of_heads), 'layer')}"] if heads else []
    if others := len(layers - of_heads):
        moved.append(f"{_count(others, 'other layer' if heads else 'layer')} moved")
    moved_in_all = ", ".join(moved)
    return [
        f"first moved: layer {_named(first, layers)} ({', '.join(metrics)}); {moved_in_all}",
        f"worst: {worst.metric} at {printable(worst.place)}{times_allowed(worst)}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def layer_of(breach: Breach) -> tuple[str, int | None]:
    """The layer of a breach: a stream and a number."""
    return breach.stream, breach.layer


def first_layer(placed: list[Breach]) -> tuple[str, int | None]:
    """The first layer among breaches that have one; of several streams, that of the first of these breaches."""
    return layer_of(min(placed, key=lambda breach: breach.layer or 0))


def _named(layer: tuple[str, int | None], among: set[tuple[str, int | None]]) -> str:
    """A layer's number, with its stream where the breaches are in several."""
    several = len({stream for stream, _ in among}) > 1
    return f"{layer[1]} of {printable(layer[0])}" if several else str(layer[1])


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
        counts = f"{rules} rule{'' if rules == 1 else 's'}, {places} comparisons"
        return f"passed: {model} against {base}: {counts}, nothing moved too far"
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


# A verdict as text: for a terminal, for GitHub (annotations and Markdown), for JUnit readers.


SHOWN, ANNOTATED, IN_SUMMARY = 10, 10, 50


def render_verdict(verdict: Verdict) -> str:
    """The verdict, where the change begins, then the breaches that are farthest beyond their bounds."""
    told = [headline(verdict), *where(verdict), *(f"note: {printable(note)}" for note in verdict.notes)]
    lines = [line for sentence in told for line in wrapped(sentence, rest="  ")]
    several = len(verdict.same_text) > 1
    ordered = by_size(verdict.breaches)
    for breach in ordered[:SHOWN]:
        lines += wrapped(describe(breach, several), first="  ", rest="    ")
    if len(ordered) > SHOWN:
        lines.append(f"  and {len(ordered) - SHOWN} more (--json or --junit lists them all)")
    return "\n".join(lines) + "\n"


def github_annotations(verdict: Verdict) -> str:
    """Workflow commands for GitHub. GitHub shows 10 errors of a step: where there are more, the tenth says how many."""
    ordered = by_size(verdict.breaches)
    kept = ordered if len(ordered) <= ANNOTATED else ordered[: ANNOTATED - 1]
    messages = [(f"{breach.metric} moved", describe(breach, len(verdict.same_text) > 1)) for breach in kept]
    if len(ordered) > len(kept):
        messages.append(("sinkscope check", f"and {len(ordered) - len(kept)} more; see the step's summary"))
    return "".join(f"::error title={_property(title)}::{_data(text)}\n" for title, text in messages)


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def markdown_verdict(verdict: Verdict) -> str:
    """The verdict as Markdown: the counts of each rule, then the breaches."""
    several = len(verdict.same_text) > 1
    state = "passed" if verdict.passed else "failed"
    lines = [f"### sinkscope check: {state}", "", markdown_cell(headline(verdict)), ""]
    lines += [f"- {markdown_cell(note)}" for note in verdict.notes] + [""]
    lines += ["#### Rules", "", "| metric | level | places | largest change | allowed | breaches |"]
    lines += ["|---|---|---:|---:|---:|---:|"]
    for tally in verdict.tallies:
        where = f"{tally.rule.level} on {markdown_cell(tally.domain)}" if several else tally.rule.level
        numbers = f"{tally.places} | {significant(tally.largest)} | {allowed_by(tally.rule)} | {len(tally.breaches)}"
        lines.append(f"| {tally.rule.metric} | {where} | {numbers} |")
    if verdict.breaches:
        lines += ["", "#### What moved too far, the farthest beyond its bound first", "", *_first_layer(verdict)]
        lines += ["| metric | place | baseline | now | allowed |", "|---|---|---:|---:|---:|"]
    for breach in by_size(verdict.breaches)[:IN_SUMMARY]:
        where = markdown_cell(f"{breach.place} on {breach.domain}" if several else breach.place)
        numbers = f"{significant(breach.baseline)} | {significant(breach.now)} | ±{significant(breach.allowed)}"
        lines.append(f"| {breach.metric} | {where} | {numbers} |")
    if len(verdict.breaches) > IN_SUMMARY:
        lines += ["", f"and {len(verdict.breaches) - IN_SUMMARY} more"]
    return "\n".join(lines) + "\n\n"


def _first_layer(verdict: Verdict) -> list[str]:
    """A line that names the first layer with a breach: what moved there moves the layers after it."""
    placed = [breach for breach in verdict.breaches if breach.layer is not None]
    if not placed:
        return []
    named = _named(first_layer(placed), {layer_of(breach) for breach in placed})
    return [f"First layer that moved: {markdown_cell(named)}.", ""]


def junit_xml(verdict: Verdict) -> bytes:
    """One test case per rule and domain; a failure lists its breaches."""
    from junitparser import Failure, JUnitXml, TestCase, TestSuite

    suite = TestSuite("sinkscope check")
    for tally in verdict.tallies:
        name = f"{tally.rule.metric} at level {tally.rule.level}"
        case = TestCase(name, classname=f"sinkscope.check.{printable(tally.domain)}", time=0)
        if tally.breaches:
            case.result = [_failure(tally, Failure)]
        suite.add_testcase(case)
    xml = JUnitXml("sinkscope")
    xml.add_testsuite(suite)
    xml.update_statistics()
    return xml.tostring()


def _failure(tally: Tally, failure: type) -> object:
    worst = by_size(tally.breaches)
    made = failure(f"{len(worst)} of {tally.places} moved too far; {describe(worst[0])}", "moved")
    made.text = "\n".join(describe(breach) for breach in worst)
    return made
