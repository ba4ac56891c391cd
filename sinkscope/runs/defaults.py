"""The version, and the defaults of a scan: the command line, the Python function and the request read them here."""

from __future__ import annotations

from sinkscope.errors import SinkscopeError

VERSION = "0.2.0"

DATA = "prose"
SEQ_LEN, NUM_SEQUENCES = 256, 32
"""Tokens per sequence, and sequences per SPEC, for text."""

EPSILON = 0.3
"""A head has a sink where alpha_0 exceeds this (Gu et al. 2410.10781)."""

DORMANT_RULE = "honor<0.4"

WINDOW, SINKS = 64, 4
"""Recent and first keys that a streaming cache keeps; a quarter of SEQ_LEN, and the four of Xiao et al. 2309.17453."""

MOST = {
    "seq-len": 2**24,
    "num-sequences": 1_000_000,
    "batch-size": 1_000_000,
    "spectra": 1_000_000,
    "generate": 1_000_000,
    "window": 2**24,
    "sinks": 2**24,
    "seed": 2**62 - 1,
    "draws": 1_000,
    "rounds": 100_000,
    "seeds": 1_000,
    "steps": 1_000_000_000,
}
"""The largest value of each numeric option: more is a slip of the keyboard, and would run out of memory or time."""


def check_not_too_large(option: str, number: int | None) -> None:
    """Raises SinkscopeError where a number exceeds MOST."""
    if number is not None and number > MOST[option]:
        raise SinkscopeError(f"--{option} {number}: at most {MOST[option]:,} is possible")


STATE_COSINE, STATE_NORM = 0.9, 5.0
"""A position is in the state of the first one where |cos with x_0| and its norm over the median exceed these."""
