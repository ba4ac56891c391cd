"""Which heads keep a whole KV cache, in the files that DuoAttention (Xiao et al. 2410.10819) and kvpress load.

Both read a folder with `full_attention_heads.tsv`, a row a layer and a column a KV head, and `config.json` with
`sink_size` and `recent_size`. They make the KV heads with the lowest scores streaming heads, which keep the first and
the recent tokens alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import FolderKind
from sinkscope.runs.schema.base import to_json

if TYPE_CHECKING:
    import pandas as pd

    from sinkscope.runs.run import Run

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
    asked = run.manifest.request
    config = {
        "model_name": run.manifest.model.id,
        "sink_size": asked.options["sinks"],
        "recent_size": asked.options["window"],
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
    found = table.groupby(keys)["distant_write"].agg(lambda values: values.max(skipna=False)).rename("score")
    return _matrix(found.to_frame().join(groups).reset_index(), run)


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
