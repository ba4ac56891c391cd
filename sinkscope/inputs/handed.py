"""What a loss is measured on: one SPEC, or texts or token ids handed over in Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import token_data
from sinkscope.inputs.documents import DataSource, Document, Texts, as_texts, check_spec

SPEC = "prose"


@dataclass(frozen=True)
class TokenRows:
    """Token ids handed over in Python, a row for each sequence."""

    rows: tuple[tuple[int, ...], ...]
    NAME = "token ids"

    @property
    def length(self) -> int:
        """Tokens of every row. Raises SinkscopeError where the rows differ in length."""
        lengths = sorted({len(row) for row in self.rows})
        if len(lengths) > 1:
            raise SinkscopeError(
                f"data: the sequences have {lengths[0]} to {lengths[-1]} tokens, and a loss is measured on sequences "
                "of one length: give seq_len="
            )
        return lengths[0]

    def source(self) -> DataSource:
        """The rows as documents, by number, as a scan names them."""
        return DataSource(self.NAME, [Document(f"sequence {at}", ids=list(row)) for at, row in enumerate(self.rows)])


Given = str | Texts | TokenRows


def loss_data(data: Any) -> Given:
    """Reads what `sinkscope.arms` takes as `data`; None is SPEC.

    A list of one SPEC stands for it. Token ids are those that `sinkscope.scan` takes; padding is left out, and packed
    rows are taken apart. Raises SinkscopeError for a SPEC that no model can read, for several, for pictures and
    sound, and for anything else.
    """
    data = SPEC if data is None else data
    if isinstance(data, str):
        check_spec(data)
        return data
    texts = as_texts(data)
    if texts is not None:
        return texts
    if isinstance(data, list | tuple) and data and all(isinstance(spec, str) for spec in data):
        if len(data) > 1:
            raise SinkscopeError(f"data: a loss is measured on one SPEC, not {len(data)}: measure each by itself")
        return loss_data(data[0])
    if hasattr(data, "keys") and set(data.keys()) - {"input_ids", "attention_mask", "position_ids"}:
        raise SinkscopeError(
            f"data: a loss is measured on text, not on {', '.join(map(str, data))}: give a SPEC, texts, or token ids "
            "(integers, [sequence, token])"
        )
    tokens = token_data(data, None)
    rows = (row[slice(*tokens.span(number))] for number, row in enumerate(tokens.ids))
    return TokenRows(tuple(tuple(row.tolist()) for row in rows))
