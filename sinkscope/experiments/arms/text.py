"""Which text interventions are measured on, and the numbers that no measurement can have: read before torch is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sinkscope.errors import SinkscopeError
from sinkscope.runs.defaults import check_not_too_large

if TYPE_CHECKING:
    from sinkscope.inputs.handed import Given


SEQUENCES = 16


@dataclass(frozen=True)
class Text:
    """Which text the loss is measured on.

    `seq_len` None is the length of the token ids that are given, else the run's, or the default of a scan.
    `num_sequences` None is all token ids that are given, else SEQUENCES.
    """

    data: Given = "prose"
    seq_len: int | None = None
    num_sequences: int | None = None
    seed: int = 0


def check_numbers(text: Text, draws: int) -> None:
    """Raises SinkscopeError for numbers that no measurement can have; called before the model is loaded."""
    numbers = (
        ("seq-len", text.seq_len), ("num-sequences", text.num_sequences), ("draws", draws), ("seed", text.seed)
    )  # fmt: skip
    for option, number in numbers:
        check_not_too_large(option, number)
    if text.seed < 0:
        raise SinkscopeError(f"--seed {text.seed}: 0 or more is needed")
    if draws < 2:
        raise SinkscopeError(f"--draws {draws}: a random control needs at least 2 draws")
    if text.seq_len is not None and text.seq_len < 2:
        raise SinkscopeError(f"--seq-len {text.seq_len}: at least 2 tokens are needed")
    if text.num_sequences is not None and text.num_sequences < 2:
        raise SinkscopeError(f"--num-sequences {text.num_sequences}: at least 2 are needed for a loss with its error")
