"""examples/nano_gpt.py: a GPT in plain torch, watched while it trains."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import sinkscope

EXAMPLE = Path(__file__).parents[2] / "examples" / "nano_gpt.py"


@pytest.mark.slow
def test_it_prints_a_column_for_each_step_that_it_watched(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("bos_mass, ")
    assert head.split() == ["domain", "step", "0", "step", "20", "step", "40"]
    assert len(rows) == 1 + 3 * 4


@pytest.mark.slow
def test_a_scan_reads_it_too() -> None:
    model = runpy.run_path(str(EXAMPLE))["GPT"]().eval()
    ids = torch.randint(256, (1, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    watched, scanned = (each.heads["bos_mass"] for each in (seen.run(), sinkscope.scan(model, data=ids)))
    assert len(scanned) == 12
    np.testing.assert_allclose(watched, scanned, rtol=1e-5)
