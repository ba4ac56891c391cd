"""Lists of heads, dormant ones, sinks or those that keep a KV cache, and of tokens that are sinks, for other tools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinkscope.errors import SinkscopeError, did_you_mean
from sinkscope.runs.folder import FolderKind
from sinkscope.runs.per_sequence import domains, not_shares
from sinkscope.runs.schema.base import to_json
from sinkscope.runs.words import says_nothing

if TYPE_CHECKING:
    from sinkscope.runs.run import Run


SELECTIONS = ("dormant", "sink")

SINK = "sink_score > {epsilon:g}"
"""The rule of the selection `sink`."""

Selection = dict[str, list[int]] | dict[str, dict[str, list[int]]]
"""Heads by layer; with several streams, by stream and then by layer."""


def selected_heads(run: Run, selection: str) -> Selection:
    """The heads that are dormant (by the run's rule) or sinks (mean sink_score > epsilon) in every domain.

    A head of which that is not known in some domain is left out (`unknown_heads`). Raises SinkscopeError where
    `selection` is neither, and where it is known of no head.
    """
    return _by_layer(run, _in_every_domain(run, _chosen(run, selection).fillna(False)))


def unknown_heads(run: Run, selection: str) -> Selection:
    """The heads of which it is not known in some domain whether they are dormant or sinks: the rule's column is empty,
    or attention is no softmax. Raises SinkscopeError as `selected_heads` does."""
    return _by_layer(run, ~_in_every_domain(run, _chosen(run, selection).notna()))


def _chosen(run: Run, selection: str) -> pd.Series:
    """Whether each row of heads.csv is chosen, NA where that is not known."""
    if selection not in SELECTIONS:
        raise SinkscopeError(
            f"--heads {selection!r}: choose one of {', '.join(SELECTIONS)}{did_you_mean(selection, SELECTIONS)}"
        )
    heads, request = run.heads, run.manifest.request
    if selection == "dormant":
        chosen = heads["dormant"].astype("boolean")
        missing = (
            f"the column of the rule {request.dormant_rule} is empty in every head: scan with another --dormant-rule"
        )
    else:
        other = not_shares(run)
        short = [
            name
            for name, stream in run.summary.streams.items()
            if says_nothing(stream.uniform_alpha_0.T, request.epsilon)
        ]
        known = heads["sink_score"].notna() & ~heads["stream"].isin([*other, *short])
        chosen = (heads["sink_score"] > request.epsilon).astype("boolean").where(known)
        missing = "no head has a sink_score"
        if other:
            missing = f"{no_softmax(other)}; --level head --metric bos_mass writes its weights"
        elif short:
            missing = (
                f"in so short sequences uniform attention gives the first token more than {request.epsilon:g}, too: "
                "scan with a larger --seq-len or --epsilon"
            )
    if chosen.isna().all():
        raise SinkscopeError(f"--heads {selection}: {missing}")
    return chosen


def no_softmax(scores: dict[str, list[str]]) -> str:
    """Why no head of these streams has a sink, as `not_shares` names their scores."""
    names = " and ".join(sorted({name for found in scores.values() for name in found} - {"softmax"}))
    return f"attention is {names}, no softmax, so that no threshold tells a sink"


def _in_every_domain(run: Run, true: pd.Series) -> pd.Series:
    """Whether it is true of a head in all its rows, by stream, layer and head."""
    places = [run.heads[name] for name in ("stream", "layer", "head")]
    return true.astype(bool).groupby(places, sort=False).all()


def _by_layer(run: Run, true: pd.Series) -> Selection:
    by_stream: dict[str, dict[str, list[int]]] = {str(stream): {} for stream in run.heads["stream"].unique()}
    for stream, layer, head in true[true].index:
        by_stream[str(stream)].setdefault(str(layer), []).append(int(head))
    return by_stream if len(by_stream) > 1 else next(iter(by_stream.values()))


def described_heads(run: Run, selection: str) -> dict[str, Any]:
    """The selected heads with what another tool needs to use them: model, text, rule, and the heads' KV groups.

    `kv_groups`: for each layer of the streams' heads, the group whose keys and values each head reads, [head]; a cache
    keeps a group if any of its heads needs it. `unknown`: the heads of `unknown_heads`. Raises SinkscopeError as
    `selected_heads` does.
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
            {name: getattr(facts, name) for name in ("domain", "sequences", "seq_len", "shortest")}
            for facts in domains(run)
        ],
        "in_every_domain": True, "kv_groups": groups if len(groups) > 1 else next(iter(groups.values())),
        "heads": chosen, "unknown": unknown_heads(run, selection),
    }  # fmt: skip


KINDS = {"sink": "attention", "state": "state", "massive": "massive"}
"""The kind of row of tokens.csv, by selection."""


@dataclass(frozen=True)
class SelectedWords:
    """What a sentence says of the tokens of a selection: of one and of several that are listed, and of one where it is
    not listed, and where it is."""

    one: str
    several: str
    never: str
    ever: str


WORDS = {
    "sink": SelectedWords("was a sink", "were sinks", "is no sink", "is a sink"),
    "state": SelectedWords(
        "had a state like the first token's", "had states like the first token's",
        "has no state like the first token's", "has a state like the first token's",
    ),
    "massive": SelectedWords(
        "held a massive activation", "held massive activations", "holds no massive activation",
        "holds a massive activation",
    ),
}  # fmt: skip
"""By selection."""

FIELDS = (
    "domain", "token", "id", "region", "first", "occurrences", "sinks", "rate", "heads", "first_layer", "last_layer",
)  # fmt: skip


MIN_RATE = 0.5
"""The share of its occurrences beyond position 0 in which a listed token is a sink at least."""


def selected_tokens(
    run: Run, selection: str, min_rate: float = MIN_RATE, domain: str | None = None
) -> dict[str, dict[str, Any]]:
    """The tokens that are sinks, by stream: `ids`, each once, those that lead tokens.csv first; `tokens`, its rows.

    `domain`: the only one that counts; all of the run's where it is None.

    `ids` are sinks in at least `min_rate` of their occurrences beyond position 0: sinks over occurrences, each summed
    over the token's rows. `ids_below_min_rate` are sinks in fewer. `ids_at_position_0_only` are apart: what begins a
    sequence is often a sink for its place, not for the token that stands there. Raises SinkscopeError where
    `selection` is none of KINDS, where `min_rate` is not from 0 to 1, where the run has no such domain, where the
    tables do not tell a token's rate over several domains, and as `_rows` does.
    """
    if not 0 <= min_rate <= 1:
        raise SinkscopeError(f"--min-rate {min_rate:g}: a share of occurrences from 0 to 1 is needed")
    if selection not in KINDS:
        raise SinkscopeError(f"--tokens {selection!r}: choose one of {', '.join(KINDS)}")
    names = [data.domain for data in run.manifest.data]
    if domain not in (None, *names):
        raise SinkscopeError(f"--domain {domain!r}: the run has {', '.join(names)}{did_you_mean(str(domain), names)}")
    chosen = _rows(run, KINDS[selection])
    if domain is not None and "domain" in chosen:
        chosen = chosen[chosen["domain"] == domain]
    by_stream = {}
    for stream in run.heads["stream"].unique():
        rows = chosen[chosen["stream"] == stream]
        first = rows["first"].astype(bool)
        later = rows[~first].dropna(subset="id").groupby("id", sort=False)[["sinks", "occurrences"]].sum()
        often = later["sinks"] >= min_rate * later["occurrences"]
        if min_rate > 0 and domain is None and "domain" in rows:
            _need_counts(run, rows[~first & rows["id"].isin(later.index[often])], str(stream), WORDS[selection])
        at_first = rows["id"][first].dropna().drop_duplicates()
        by_stream[str(stream)] = {
            "min_rate": min_rate, "ids": _ids(later.index[often]), "ids_below_min_rate": _ids(later.index[~often]),
            "ids_at_position_0_only": _ids(token_id for token_id in at_first if token_id not in later.index),
            "tokens": _plain(rows),
        }  # fmt: skip
    return by_stream


def _need_counts(run: Run, rows: pd.DataFrame, stream: str, words: SelectedWords) -> None:
    """Raises SinkscopeError where a domain has no row of one of these tokens: it may occur there without being a sink,
    and then its rate over all domains is lower than its rows tell."""
    everywhere = set(run.heads["domain"][run.heads["stream"] == stream])
    for token, own in rows.groupby("id", sort=False):
        if lacking := sorted(everywhere - set(own["domain"])):
            raise SinkscopeError(
                f"the run does not tell the rate of token {token} over its {len(everywhere)} datasets: it "
                f"{words.never} in {lacking[0]}, where tokens.csv does not count it; --domain NAME takes one dataset, "
                f"--min-rate 0 every token that {words.ever}"
            )


def _ids(values: Iterable[Any]) -> list[int]:
    return [int(value) for value in values]


def sink_ids(run: Run) -> tuple[list[int], list[int]]:
    """Ids of the tokens that are attention sinks in tokens.csv: those that are one at position 0, and those that are
    one elsewhere. Raises SinkscopeError as `_rows` does, and where there is none."""
    rows = _rows(run, KINDS["sink"]).dropna(subset="id")
    if rows.empty:
        raise SinkscopeError(f"no token is an attention sink in tokens.csv of {run.path or 'the run'}")
    first = rows["first"].astype(bool)
    return sorted({int(token) for token in rows["id"][first]}), sorted({int(token) for token in rows["id"][~first]})


def _rows(run: Run, kind: str) -> pd.DataFrame:
    """The rows of tokens.csv of one kind. Raises SinkscopeError for a run of an older sinkscope, and for attention
    sinks where no attention is a softmax."""
    if run.tokens is None:
        raise SinkscopeError(f"{run.path or 'the run'} holds no tokens.csv: an older sinkscope wrote it; scan it again")
    if (
        kind == "attention"
        and run.manifest.attention
        and all(site.score != "softmax" for site in run.manifest.attention)
    ):
        raise SinkscopeError(f"{run.path or 'the run'} tells no attention sinks: {no_softmax(not_shares(run))}")
    return run.tokens[run.tokens["kind"] == kind]


def _plain(rows: pd.DataFrame) -> list[dict[str, Any]]:
    named = [name for name in FIELDS if name in rows]
    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in rows[named].astype(object).to_dict("records")
    ]


# Which heads keep a whole KV cache, in the files that DuoAttention (Xiao et al. 2410.10819) and kvpress load.
#
# Both read a folder with `full_attention_heads.tsv`, a row a layer and a column a KV head, and `config.json` with
# `sink_size` and `recent_size`. They make the KV heads with the lowest scores streaming heads, which keep the first and
# the recent tokens alone.


SCORES, CONFIG = "full_attention_heads.tsv", "config.json"
FOLDER = FolderKind(
    "DuoAttention pattern",
    frozenset({SCORES, CONFIG}),
    lambda folder: True if all((folder / name).is_file() for name in (SCORES, CONFIG)) else None,
)
NARROW = (
    "the scores have one row or one column; numpy.loadtxt, with which DuoAttention and kvpress read them, makes a "
    "vector of that: reshape it to (layers, KV heads)"
)


def write_pattern(run: Run, folder: str | Path) -> list[str]:
    """Writes the two files; returns warnings. An earlier pattern in the folder is replaced.

    Raises SinkscopeError where the run has no score of some KV head, and where the folder holds other files.
    """
    scores = kv_scores(run)
    request = run.manifest.request
    config = {
        "model_name": run.manifest.model.id,
        "sink_size": request.options["sinks"],
        "recent_size": request.options["window"],
        "score": "distant_write of sinkscope, the largest of the KV head's query heads and of the domains, at most 1",
        "dataset_name": ", ".join(run.summary.data),
    }

    def fill(work: Path) -> None:
        np.savetxt(work / SCORES, scores, delimiter="\t")
        (work / CONFIG).write_text(to_json(config), encoding="utf-8")

    FOLDER.write(folder, force=True, fill=fill)
    return [NARROW] if 1 in scores.shape else []


def kv_scores(run: Run) -> np.ndarray:
    """Each KV head's score, [layer, KV head]: the largest distant_write of its query heads in any domain, at most 1.

    Raises SinkscopeError where some layer or head of the model has none.
    """
    table = run.measured.get("streaming")
    if table is None:
        raise SinkscopeError("--heads streaming needs a run with --measure streaming")
    keys = ["stream", "layer", "head"]
    groups = run.heads.drop_duplicates(keys).set_index(keys)["kv_group"]
    scores = table.groupby(keys)["distant_write"].agg(lambda values: values.max(skipna=False)).rename("score")
    return _matrix(scores.to_frame().join(groups).reset_index(), run)


def _matrix(heads: pd.DataFrame, run: Run) -> np.ndarray:
    streams = heads["stream"].unique()
    if len(streams) > 1:
        raise SinkscopeError(f"--heads streaming: the format holds one stream of attention, not {', '.join(streams)}")
    missing = heads[heads["score"].isna()]
    if len(missing):
        layer, head = missing.iloc[0][["layer", "head"]]
        raise SinkscopeError(
            f"--heads streaming: head {layer}.{head} has no distant_write, as where no sequence is longer than --sinks "
            f"and --window together; {len(missing)} of {len(heads)} heads lack it"
        )
    if run.summary.not_softmax or sorted(heads["layer"].unique()) != list(range(heads["layer"].nunique())):
        raise SinkscopeError("--heads streaming: the format needs attention in every layer of the model")
    scores = heads.pivot_table(index="layer", columns="kv_group", values="score", aggfunc="max")
    if scores.isna().any(axis=None):
        raise SinkscopeError("--heads streaming: the format needs the same number of KV heads in every layer")
    return np.clip(scores.to_numpy(dtype=float), 0.0, 1.0)
