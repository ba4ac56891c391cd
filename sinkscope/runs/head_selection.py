"""Lists of the heads that are dormant, or sinks, for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.per_sequence import domains

if TYPE_CHECKING:
    from sinkscope.runs.run import Run

SELECTIONS = ("dormant", "sink")

SINK = "sink_score > {epsilon:g}"
"""The rule of the selection `sink`."""

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


def described_heads(run: Run, selection: str) -> dict[str, Any]:
    """The selected heads with what another tool needs to use them: model, text, rule, and the heads' KV groups.

    `kv_groups`: for each layer of the streams' heads, the group whose keys and values each head reads, [head]; a cache
    keeps a group if any of its heads needs it. Raises SinkscopeError where `selection` is neither.
    """
    chosen, request = selected_heads(run, selection), run.manifest.request
    groups: dict[str, dict[str, list[int]]] = {}
    for (stream, layer), rows in run.heads.groupby(["stream", "layer"], sort=False):
        by_head = rows.drop_duplicates("head").sort_values("head")["kv_group"]
        groups.setdefault(str(stream), {})[str(layer)] = [int(group) for group in by_head]
    model = run.manifest.model
    return {
        "model": model.id, "revision": model.revision, "weights_sha256": model.weights_sha256,
        "selection": selection, "rule": request.dormant_rule if selection == "dormant" else SINK.format(
            epsilon=request.epsilon
        ),
        "data": [
            {"domain": each.domain, "sequences": each.sequences, "seq_len": each.seq_len} for each in domains(run)
        ],
        "in_every_domain": True, "kv_groups": groups if len(groups) > 1 else next(iter(groups.values())),
        "heads": chosen,
    }  # fmt: skip
