"""A verdict as text: for a terminal, for GitHub (annotations and Markdown), for JUnit readers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.numbers import significant
from sinkscope.present.text import markdown_cell, printable
from sinkscope.present.verdict import allowed_by, by_size, describe, headline, where

if TYPE_CHECKING:
    from sinkscope.comparison.verdict import Tally, Verdict


SHOWN, ANNOTATED, IN_SUMMARY = 10, 10, 50


def render_verdict(verdict: Verdict) -> str:
    """The verdict on one line, where the change begins, then the breaches that are farthest beyond their bounds."""
    lines = [headline(verdict), *where(verdict)]
    lines += [f"note: {printable(note)}" for note in verdict.notes]
    several = len(verdict.same_text) > 1
    ordered = by_size(verdict.breaches)
    lines += [f"  {describe(breach, several)}" for breach in ordered[:SHOWN]]
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
    layers = [breach.layer for breach in verdict.breaches if breach.layer is not None]
    return [f"First layer that moved: {min(layers)}.", ""] if layers else []


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
