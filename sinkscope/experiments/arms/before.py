"""What an earlier measurement of arms left in a folder: the same one's result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sinkscope.checkpoints import Checkpoint
from sinkscope.engine.shards import first_difference
from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.experiment import held_out
from sinkscope.experiments.arms.text import Text
from sinkscope.inputs.handed import loss_data
from sinkscope.runs.saved.arms import SavedArms, load_arms

MODEL = (
    "id", "revision", "weights_sha256", "config_sha256", "tokenizer_sha256", "model_type", "dtype", "device",
    "quantization",
)  # fmt: skip
"""The facts of a model that are the same with and without its head."""

TEXT = ("spec", "fingerprint", "sequences", "seq_len")


def arms_before(
    folder: Path, arms: Sequence[str], checkpoint: Checkpoint, *, num_sequences: int, draws: int, data: Any = "prose",
    seq_len: int | None = None, seed: int = 0,
) -> SavedArms:  # fmt: skip
    """The finished measurement in a folder, where it is of these arms, this text and this model, with its head or
    without it. No run was given to it. The keywords are those of `sinkscope.arms`.

    Raises SinkscopeError where it is another one, naming the first difference, and where the folder or the text cannot
    be read.
    """
    saved, text = load_arms(folder), Text(loss_data(data), seq_len, num_sequences, seed)
    corpus = held_out(text, checkpoint, None)
    sequences, length = corpus.ids.shape
    new: dict[str, Any] = {
        "model": {name: checkpoint.facts.get(name) for name in MODEL},
        "arms": sorted(arms),
        "draws": draws,
        "seed": seed,
        "data": dict(zip(TEXT, (corpus.domain, corpus.fingerprint, int(sequences), int(length)), strict=True)),
        "run": None,
    }
    facts = saved.facts
    old: dict[str, Any] = {
        "model": {name: getattr(facts.model, name) for name in MODEL},
        "data": {name: getattr(facts.data, name) for name in TEXT},
        "arms": sorted({*arms} & {*facts.arms}),  # its companions and controls stand there too
        "draws": facts.draws,
        "seed": facts.seed,
        "run": None if facts.run is None else facts.run.path,
    }
    different = [name for name in new if new[name] != old[name]]
    if different:
        raise SinkscopeError(
            f"{folder} holds a finished measurement of arms with another {first_difference(new, old, different)}; give "
            "another --out, or --force to replace it"
        )
    if new["model"]["weights_sha256"] is None:
        raise SinkscopeError(
            f"{folder} holds a finished measurement of arms, and nothing tells whether it is of this model: a model "
            "object has no hash of files; give another --out, or --force to replace it"
        )
    return saved
