"""Reading, comparing and showing a saved run, in one process that must load neither torch nor transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from desk import scanned

from sinkscope.present.figures.run import draw

SCRIPT = """
import json, sys
import sinkscope
loaded = [name for name in ("torch", "transformers", "pandas") if name in sys.modules]
assert not loaded, f"import sinkscope loads {loaded}"
from typer.testing import CliRunner
from sinkscope.cli import app

for words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, words)
    loaded = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    assert result.exit_code == 0, (words, result.stderr)
    assert not loaded, f"{words[0]} loads {loaded}"
sinkscope.check, sinkscope.read_policy, sinkscope.baseline_of, sinkscope.compare, sinkscope.load_run
assert "torch" not in sys.modules
"""


@pytest.mark.slow
def test_a_saved_run_is_read_without_torch(tmp_path: Path) -> None:
    """And a figure is the same bytes as in a process that has scanned: its unit and bounds hang on no import."""
    run = scanned()
    run.save(tmp_path / "run")
    commands = [
        ["compare", "run", "run", "--json"],
        ["export", "run", "--format", "latex", "--metric", "sink_heads"],
        ["export", "run", "--format", "bibtex"],
        ["report", "run", "run", "-o", "report.html"],
        ["metrics"],
        ["plot", "run", "--figure", "heatmap", "--metric", "peak_score", "-o", "peak.svg"],
        ["baseline", "run", "-o", "sinks.json"],
        ["check", "run", "--baseline", "sinks.json"],
    ]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "peak.svg").read_bytes() == draw(run, "heatmap", "svg", "column", "peak_score")
    assert b"peak score (probability)" in (tmp_path / "peak.svg").read_bytes()
