"""Lists of the heads that are dormant, or sinks, for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError, did_you_mean

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

SELECTIONS = ("dormant", "sink")

Selection = dict[str, list[int]] | dict[str, dict[str, list[int]]]
"""Heads by layer; with several streams, by stream and then by layer."""


def selected_heads(run: Run, selection: str) -> Selection:
    """The heads that are dormant (by the run's rule) or sinks (mean sink_score > epsilon) in every domain.

    Raises SinkscopeError where `selection` is neither.
    """
    if selection not in SELECTIONS:
        raise SinkscopeError(
            f"--heads {selection!r}: one of {', '.join(SELECTIONS)}{did_you_mean(selection, SELECTIONS)}"
        )
    heads = run.heads
    chosen = (
        heads["dormant"].fillna(False).astype(bool)
        if selection == "dormant"
        else heads["sink_score"] > run.manifest.request.epsilon
    )
    everywhere = chosen.groupby([heads["stream"], heads["layer"], heads["head"]], sort=False).all()
    found: dict[str, dict[str, list[int]]] = {str(stream): {} for stream in heads["stream"].unique()}
    for stream, layer, head in everywhere[everywhere].index:
        found[str(stream)].setdefault(str(layer), []).append(int(head))
    return found if len(found) > 1 else next(iter(found.values()))
