"""The grammar of arms: KIND:REST, where each kind reads its own rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm


@dataclass(frozen=True)
class Kind:
    """A kind of arm: how it is written, what it does, where it comes from, and what reads its rest."""

    name: str
    grammar: str
    what: str
    source: str
    read: Callable[[str], Arm]


KINDS: dict[str, Kind] = {}
"""Every declared kind, by name, in the order of their declaration."""


def arm_kind(name: str, grammar: str, source: str) -> Callable[[Callable[[str], Arm]], Callable[[str], Arm]]:
    """Declares a kind of arm: the function reads what follows `NAME:`, and its docstring says what the arm does.

    The function raises SinkscopeError for a rest that it cannot read. Raises SinkscopeError for a name that is declared
    already.
    """

    def declare(read: Callable[[str], Arm]) -> Callable[[str], Arm]:
        if name in KINDS:
            raise SinkscopeError(f"the kind of arm {name!r} is declared already")
        KINDS[name] = Kind(name, grammar, " ".join((read.__doc__ or "").split()), source, read)
        return read

    return declare


def read_arm(text: str) -> Arm:
    """Reads one arm. Raises SinkscopeError for an unknown kind, or a rest that its kind cannot read."""
    import sinkscope.experiments.arms.kinds  # noqa: F401 - declares the kinds that ship with sinkscope

    name, _, rest = text.partition(":")
    if name not in KINDS:
        raise SinkscopeError(f"--arm {text!r}: no such kind of arm; one of {', '.join(KINDS)}")
    try:
        return KINDS[name].read(rest)
    except SinkscopeError as error:
        raise SinkscopeError(f"--arm {text!r}: {error}; write {KINDS[name].grammar}") from None


def number(text: str, what: str, least: int, most: int = 2**24) -> int:
    """Reads a whole number. Raises SinkscopeError, which names `what`, where it is none or outside least..most."""
    if not text.isascii() or not text.isdigit() or len(text) > 12 or not least <= int(text) <= most:
        raise SinkscopeError(f"{what} {text[:20]!r} is no whole number from {least} to {most:,}")
    return int(text)
