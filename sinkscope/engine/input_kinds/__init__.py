"""What a scan can read, one kind a module. Adding a kind: a class of the contract in `kind`, and its place in the list.

The engine asks the kinds in order and knows none of them by name.
"""

from __future__ import annotations

from collections.abc import Iterator

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.input_kinds.kind import Asked, InputKind, asked_of
from sinkscope.engine.input_kinds.signals import SignalInput
from sinkscope.engine.input_kinds.signals_with_text import SignalTextInput
from sinkscope.engine.input_kinds.task import TaskInput
from sinkscope.engine.input_kinds.text import TextInput
from sinkscope.engine.input_kinds.token_ids import TokenIdInput
from sinkscope.engine.reading import Reading
from sinkscope.errors import SinkscopeError

__all__ = ["INPUT_KINDS", "Asked", "InputKind", "Reading", "asked_of", "check_asked", "claim", "kind_asked_for"]

INPUT_KINDS: list[type[InputKind]] = [SignalTextInput, SignalInput, TaskInput, TokenIdInput, TextInput]
"""The first that claims a request answers it. A kind from outside the package goes in front."""


def kind_asked_for(asked: Asked) -> type[InputKind]:
    """The kind that a request asks for by itself; the model may turn it into another. Raises SinkscopeError: none."""
    return _first((kind for kind in INPUT_KINDS if kind.asked_for(asked)), asked)


def check_asked(asked: Asked) -> None:
    """Refuses what no model can read, before one is loaded. Raises SinkscopeError."""
    kind_asked_for(asked).check(asked)


def claim(asked: Asked, checkpoint: Checkpoint, forward: Forward) -> InputKind:
    """The kind that answers a request for a model. Raises SinkscopeError where the model cannot read what is asked."""
    kind = _first((kind for kind in INPUT_KINDS if kind.claims(asked, checkpoint, forward)), asked)
    return kind(asked, checkpoint, forward)


def _first(kinds: Iterator[type[InputKind]], asked: Asked) -> type[InputKind]:
    found = next(kinds, None)
    if found is None:
        raise SinkscopeError(f"data: no kind of input reads {type(asked.given).__name__}")
    return found
