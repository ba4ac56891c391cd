"""examples/clients and examples/nano_gpt.py under `sinkscope watch`: what docs/clients.md shows of them is so."""

from __future__ import annotations

import client_evidence
import pytest
from clients import CLIENTS
from libraries import library

REAL = {key for key, client in CLIENTS.items() if "$" in client.program}
"""Programs that a real checkpoint is given to."""


@pytest.mark.slow
@pytest.mark.parametrize("key", [pytest.param(key, marks=[pytest.mark.real] * (key in REAL)) for key in CLIENTS])
def test_a_program_is_read_and_runs_as_without_a_watch(key: str) -> None:
    """Its heads are those of the library's own float64 maps, its outputs the same bit for bit, and nothing stays."""
    library(CLIENTS[key].library.replace("-", "_"))
    found = client_evidence.of_process(key)
    watches = CLIENTS[key].watches
    assert (found.the_same, found.prints_the_same, found.left) == (True, None if watches else True, [])
    apart = {each.column: each.largest for each in found.checks}
    assert apart["bos_mass"] < 1e-5
    assert apart["entropy"] < 1e-4
    assert found.printed[-1].startswith("sinkscope: measured ") or watches
