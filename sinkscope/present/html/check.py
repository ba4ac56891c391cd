"""A check against a baseline as one HTML page that needs no network and no script: what moved, and where it begins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinkscope.present.colors import DIVERGING
from sinkscope.present.html.page import render_page
from sinkscope.present.html.svg import Cell, Line, heat_map, legend, line_chart
from sinkscope.present.numbers import MISSING, probability, signed, significant
from sinkscope.present.text import shortened, token_text
from sinkscope.present.verdict import allowed_by, by_size, headline, times_allowed, where
from sinkscope.runs.per_sequence import tokens_of
from sinkscope.runs.words import computed_in, sequences_of_tokens

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.comparison.gate import Breach, Tally, Verdict
    from sinkscope.runs.schema.baseline import BaselineFile
    from sinkscope.runs.schema.manifest import Manifest

LISTED, HEADS = 200, 12
"""Most breaches that are listed, and most heads of a layer that are named."""
SQUARES = 2048
"""Most heads of a map whose squares have their values on hover."""


def render_check(verdict: Verdict, baseline: BaselineFile | Manifest, now: BaselineFile | Manifest) -> str:
    """The whole page. `baseline`, `now`: what is known of the two runs. All names are escaped as text."""
    ordered = by_size(verdict.breaches)
    several = len(verdict.same_text) > 1
    large = any(tally.rule.level == "head" and len(tally.moved) > SQUARES for tally in verdict.tallies)
    return render_page(
        "check.html", ("page.css", "report.css"), (), model=verdict.model, passed=verdict.passed,
        headline=headline(verdict), where=where(verdict), notes=verdict.notes, large=large,
        maps=_maps(verdict, large), profiles=_profiles(verdict), layers=_layers(verdict.breaches),
        breaches=[_row(breach, several) for breach in ordered[:LISTED]], more=max(0, len(ordered) - LISTED),
        tested=any(breach.q is not None for breach in ordered), rules=[_rule(tally) for tally in verdict.tallies],
        facts=_facts(baseline, now),
    )  # fmt: skip


def _row(breach: Breach, several: bool) -> dict[str, str]:
    return {
        "metric": breach.metric, "place": f"{breach.place} on {breach.domain}" if several else breach.place,
        "baseline": significant(breach.baseline), "now": significant(breach.now),
        "change": _change(breach.baseline, breach.now), "allowed": significant(breach.allowed),
        "q": MISSING if breach.q is None else probability(breach.q),
    }  # fmt: skip


def _change(before: float | None, after: float | None) -> str:
    return signed(None if before is None or after is None else after - before)


def _layers(breaches: list[Breach]) -> list[dict[str, Any]]:
    """A row for each stream and layer with a breach, in the model's order."""
    groups: dict[tuple[str, int], list[Breach]] = {}
    for breach in breaches:
        if breach.layer is not None:
            groups.setdefault((breach.stream, breach.layer), []).append(breach)
    rows = []
    for (stream, layer), group in sorted(groups.items()):
        heads = sorted({breach.head for breach in group if breach.head is not None})
        named = ", ".join(map(str, heads[:HEADS])) + (f" and {len(heads) - HEADS} more" if len(heads) > HEADS else "")
        worst = by_size(group)[0]
        rows.append({
            "place": str(layer) if stream == "text" else f"{stream} {layer}", "heads": named or MISSING,
            "metrics": list(dict.fromkeys(breach.metric for breach in group)),
            "worst": f"{worst.metric} at {worst.place}{times_allowed(worst)}",
        })  # fmt: skip
    return rows


def _maps(verdict: Verdict, large: bool) -> list[dict[str, Any]]:
    """A map of the differences for each rule on heads, stream and domain in which a head changed."""
    maps = []
    for tally in verdict.tallies:
        if tally.rule.level == "head":
            for stream, rows in tally.moved.groupby("stream", sort=False):
                maps += _map(tally, _where(verdict, tally, str(stream)), rows, large)
    return maps


def _map(tally: Tally, place: str, rows: pd.DataFrame, large: bool) -> list[dict[str, Any]]:
    difference = rows["now"] - rows["baseline"]
    most = float(difference.abs().max())
    if not most > 0 and not rows["breach"].any():
        return []
    most = most if most > 0 else 1.0  # a value that is missing on one side alone
    layers = list(dict.fromkeys(rows["layer"]))
    order = {layer: row for row, layer in enumerate(layers)}
    cells = [
        Cell(order[row["layer"]], int(row["head"]), change,
             f"layer {row['layer']}, head {row['head']}: {significant(row['baseline'])} to {significant(row['now'])} "
             f"({_change(row['baseline'], row['now'])}, allowed ±{significant(row['allowed'])})",
             marked=bool(row["breach"]))
        for row, change in zip(rows.to_dict("records"), difference, strict=True)
    ]  # fmt: skip
    caption, bounds = (
        f"{tally.rule.metric}{place}: {int(rows['breach'].sum())} of {len(rows)} heads moved too far",
        (-most, most),
    )
    drawn = heat_map(cells, [str(layer) for layer in layers], int(rows["head"].max()) + 1, bounds, caption, DIVERGING,
                     dense=large)  # fmt: skip
    return [{"caption": caption, "svg": drawn, "legend": legend(bounds, "new run - baseline", DIVERGING)}]


def _profiles(verdict: Verdict) -> list[dict[str, Any]]:
    """Baseline and new run over the layers, for each rule on layers that was broken."""
    charts = []
    for tally in verdict.tallies:
        if tally.rule.level != "layer" or not tally.breaches:
            continue
        for stream, rows in tally.moved.groupby("stream", sort=False):
            x = rows["layer"].astype(float).tolist()
            lines = [
                Line(label, x, rows[name].tolist()) for label, name in (("baseline", "baseline"), ("new run", "now"))
            ]
            caption = f"{tally.rule.metric}{_where(verdict, tally, str(stream))}, mean over heads"
            charts.append({"caption": caption, "svg": line_chart(lines, "layer", tally.rule.metric),
                           "labels": [line.label for line in lines]})  # fmt: skip
    return charts


def _where(verdict: Verdict, tally: Tally, stream: str) -> str:
    """Stream and domain, each only where it says anything."""
    parts = [stream] if stream != "text" else []
    parts += [shortened(tally.domain, 60)] if len(verdict.same_text) > 1 else []
    return f" on {', '.join(parts)}" if parts else ""


def _rule(tally: Tally) -> dict[str, Any]:
    return {
        "metric": tally.rule.metric, "level": tally.rule.level, "domain": tally.domain, "places": tally.places,
        "largest": significant(tally.largest), "allowed": allowed_by(tally.rule), "breaches": len(tally.breaches),
    }  # fmt: skip


def _facts(*runs: BaselineFile | Manifest) -> list[tuple[str, str, str]]:
    """Name of a fact, and what it is of the baseline and of the run."""
    facts = []
    for run in runs:
        model, first = run.model, run.first_token
        facts.append({
            "model": model.shown, "revision": model.revision or MISSING,
            "weights SHA-256": model.weights_sha256 or MISSING,
            "computed in": computed_in(model.dtype, model.device, model.quantization),
            "data": "; ".join(f"{data.domain}: {sequences_of_tokens(data.sequences, tokens_of(data))}"
                              for data in run.data),
            "first token": "differs between sequences" if first.id is None
            else f"{token_text(str(first.text))} (id {first.id})",
            "made by": f"sinkscope {run.sinkscope}",
        })  # fmt: skip
    return [(name, facts[0][name], facts[1][name]) for name in facts[0]]
