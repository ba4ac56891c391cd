"""The kinds of input, one per module. To add one, write a subclass of `kind.InputKind` and list it in INPUT_KINDS.

The engine asks the kinds in order and knows none of them by name.
"""

from __future__ import annotations

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.input_kinds.kind import Asked, InputKind, asked_of
from sinkscope.engine.input_kinds.signals import SignalInput
from sinkscope.engine.input_kinds.signals_with_text import SignalTextInput
from sinkscope.engine.input_kinds.task import TaskInput
from sinkscope.engine.input_kinds.text import TextInput
from sinkscope.engine.input_kinds.token_ids import TokenIdInput
from sinkscope.engine.reading import Reading

__all__ = ["INPUT_KINDS", "Asked", "InputKind", "Reading", "asked_of", "check_asked", "claim", "kind_asked_for"]

INPUT_KINDS: list[type[InputKind]] = [SignalTextInput, SignalInput, TaskInput, TokenIdInput, TextInput]
"""The first that claims a request answers it; the last two leave none unclaimed. A kind from outside goes in front."""


def kind_asked_for(asked: Asked) -> type[InputKind]:
    """The kind that the request alone asks for; a model may claim another."""
    return next(kind for kind in INPUT_KINDS if kind.asked_for(asked))


def check_asked(asked: Asked) -> None:
    """Raises SinkscopeError for a request that no model can read; called before a model is loaded."""
    kind_asked_for(asked).check(asked)


def claim(asked: Asked, checkpoint: Checkpoint, forward: Forward) -> InputKind:
    """Creates the kind that reads a request for a model. Raises SinkscopeError where the model cannot read it."""
    kind = next(kind for kind in INPUT_KINDS if kind.claims(asked, checkpoint, forward))
    return kind(asked, checkpoint, forward)
