"""The kinds of input, one per module. A kind is a subclass of `kind.InputKind` that INPUT_KINDS names.

The engine asks the kinds in order and knows none of them by name. A package adds a kind by an entry point of the group
`sinkscope.input_kinds`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from inspect import isabstract

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.lookup import Lookup
from sinkscope.runs.request import Request

__all__ = ["INPUT_KINDS", "InputKind", "Reading", "blaming", "check_asked", "claim", "kind_asked_for"]


def _lacks(name: str, kind: object) -> str | None:
    if not isinstance(kind, type) or not issubclass(kind, InputKind):
        return "a subclass of InputKind"
    return "complete: a kind of input defines name, asked_for and read" if isabstract(kind) else None


_HERE = "sinkscope.engine.input_kinds"
INPUT_KINDS: Lookup[type[InputKind]] = Lookup(
    "kind of input",
    {
        "signals with text": f"{_HERE}.signals_with_text:SignalTextInput",
        "signals": f"{_HERE}.signals:SignalInput",
        "the model's own task": f"{_HERE}.task:TaskInput",
        "texts": f"{_HERE}.handed:TextsInput",
        "token ids": f"{_HERE}.handed:TokenIdInput",
        "text": f"{_HERE}.text:TextInput",
    },
    "sinkscope.input_kinds",
    _lacks,
)
"""The first that claims a request answers it; the last two leave none unclaimed. Kinds from outside are asked first."""


def _first(claims: Callable[[type[InputKind]], bool]) -> type[InputKind]:
    """The first kind that claims it. A warning names a package's kind that does not load: what sinkscope itself reads,
    it reads as ever, and what only that kind would read, the last kinds refuse."""
    for name in sorted(filter(INPUT_KINDS.loads, INPUT_KINDS), key=INPUT_KINDS.ships):
        kind = INPUT_KINDS[name]
        with INPUT_KINDS.blaming(name):
            if claims(kind):
                return kind
    raise AssertionError("the last kinds leave no request unclaimed")


def kind_asked_for(request: Request) -> type[InputKind]:
    """The kind that the request alone asks for; a model may claim another."""
    return _first(lambda kind: kind.asked_for(request))


def check_asked(request: Request) -> None:
    """Raises SinkscopeError for a request that no model can read; called before a model is loaded."""
    kind = kind_asked_for(request)
    with blaming(kind):
        kind.check(request)


def claim(request: Request, checkpoint: Checkpoint) -> InputKind:
    """Creates the kind that reads a request for a model. Raises SinkscopeError where the model cannot read it."""
    forward = Forward(checkpoint.model)
    kind = _first(lambda kind: kind.claims(request, checkpoint, forward))
    with blaming(kind):
        return kind(request, checkpoint, forward)


def blaming(kind: type[InputKind]) -> AbstractContextManager[None]:
    """Within the block, another package's kind that fails is named, with its package (`Lookup.blaming`)."""
    name = next((name for name in filter(INPUT_KINDS.loads, INPUT_KINDS) if INPUT_KINDS[name] is kind), None)
    return nullcontext() if name is None else INPUT_KINDS.blaming(name)
