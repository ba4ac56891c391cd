"""Lists of heads, dormant ones or sinks, and of tokens that are sinks, for other tools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

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


KINDS = {"sink": "attention", "state": "state", "massive": "massive"}
"""The kind of row of tokens.csv, by selection."""

FIELDS = (
    "domain", "token", "id", "region", "first", "occurrences", "sinks", "rate", "heads", "first_layer", "last_layer",
)  # fmt: skip


def selected_tokens(run: Run, selection: str) -> dict[str, dict[str, Any]]:
    """The tokens that are sinks, by stream: `ids`, each once, those that lead tokens.csv first; `tokens`, its rows.

    `ids` are sinks beyond position 0. `ids_at_position_0_only` are apart: what begins a sequence is often a sink for
    its place, not for the token that stands there. Raises SinkscopeError where `selection` is none of KINDS, and for a
    run of an older sinkscope.
    """
    if selection not in KINDS:
        raise SinkscopeError(f"--tokens {selection!r}: one of {', '.join(KINDS)}")
    chosen = _rows(run, KINDS[selection])
    found = {}
    for stream in run.heads["stream"].unique():
        rows = chosen[chosen["stream"] == stream]
        first = rows["first"].astype(bool)
        later, at_first = (
            [int(each) for each in rows["id"][own].dropna().drop_duplicates()] for own in (~first, first)
        )
        apart = [each for each in at_first if each not in later]
        found[str(stream)] = {"ids": later, "ids_at_position_0_only": apart, "tokens": _plain(rows)}
    return found


def sink_ids(run: Run) -> tuple[list[int], list[int]]:
    """Ids of the tokens that are attention sinks in tokens.csv: those that are one at position 0, and those that are
    one elsewhere. Raises SinkscopeError for a run of an older sinkscope, and where there is none."""
    rows = _rows(run, KINDS["sink"]).dropna(subset="id")
    if rows.empty:
        raise SinkscopeError(f"no token is an attention sink in tokens.csv of {run.path or 'the run'}")
    first = rows["first"].astype(bool)
    return sorted({int(each) for each in rows["id"][first]}), sorted({int(each) for each in rows["id"][~first]})


def _rows(run: Run, kind: str) -> pd.DataFrame:
    """The rows of tokens.csv of one kind. Raises SinkscopeError for a run of an older sinkscope."""
    if run.tokens is None:
        raise SinkscopeError(f"{run.path or 'the run'} holds no tokens.csv: an older sinkscope wrote it; scan it again")
    return run.tokens[run.tokens["kind"] == kind]


def _plain(rows: pd.DataFrame) -> list[dict[str, Any]]:
    named = [name for name in FIELDS if name in rows]
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in rows[named].astype(object).to_dict("records")
    ]
