"""Reading, comparing and showing a saved run, and refusing bad options, in processes that must not load torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from arm_folders import write_arms
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
    write_arms(tmp_path / "arms", run)
    commands = [
        ["compare", "run", "run", "--json"],
        ["export", "run", "--format", "latex", "--metric", "sink_heads"],
        ["export", "run", "--format", "bibtex"],
        ["report", "run", "run", "--arms", "arms", "-o", "report.html"],
        ["export", "run", "--format", "hf-dataset", "-o", "dataset"],
        ["atlas", "run", "run", "-o", "atlas.html", "--csv", "atlas.csv"],
        ["card", "run", "--badge", "badge.svg"],
        ["metrics"],
        ["schema", "heads"],
        ["show", "run"],
        ["show", "run", "--json"],
        ["examples"],
        ["claims", "--list"],
        ["claims", "run", "--claim", "first-token", "--claim", "hard-switch", "--claim", "stays-at-the-first-position"],
        ["plot", "run", "--figure", "heatmap", "--metric", "peak_score", "-o", "peak.svg"],
        ["baseline", "run", "-o", "sinks.json"],
        ["check", "run", "--baseline", "sinks.json", "--html", "check.html"],
        ["plot", "run", "run", "--figure", "profile", "-o", "profile.svg"],
    ]
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(commands)], cwd=tmp_path, env={**os.environ, "PYTHONPATH": root},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "peak.svg").read_bytes() == draw(run, "heatmap", "svg", "column", "peak_score")
    assert b"peak score (probability)" in (tmp_path / "peak.svg").read_bytes()


REFUSED = {
    "scan example:minilm --dtype int8": "unknown dtype 'int8'",
    "scan example:minilm --bos sometimes": "--bos 'sometimes': choose one of auto",
    "scan example:minilm --bos=": "--bos '': choose one of auto",
    "scan example:minilm --seq-len 1": "--seq-len 1: at least 2",
    "scan example:minilm --data proze": "did you mean prose?",
    "scan example:minilm --images nowhere --data prose": "give one of them",
    "scan example:gema": "did you mean gemma-3-270m?",
    "scan meta-llama/Llama-3-8B": "did you mean meta-llama/Meta-Llama-3-8B",
    "scan gpt2x": "did you mean openai-community/gpt2",
    "scan ./nowhere": "no such model folder",
    "bench example:minilm --dtype int8": "unknown dtype 'int8'",
    "compare run nowhere --dtype int8": "unknown dtype 'int8'",
    "compare run run --dtype float16": "--dtype goes with a model that is scanned on the spot, and run is a run folder",
    "baseline run -o x.json --device cpu": "--device goes with a model",
    "check run --baseline run --trust-remote-code": "--trust-remote-code goes with a model",
    "check run --baseline run --metrics mine.py": "--metrics goes with a model",
    "ablate example:minilm --run run --data proze": "did you mean prose?",
    "metrics bos": "did you mean bos_mass",
    "plot run --figure heatmapp -o x.png": "did you mean heatmap?",
    "plot run --figure heatmap --metric bosmass -o x.png": "did you mean bos_mass",
    "export run --format latx": "did you mean latex?",
    "export run --metric entropi": "did you mean entropy",
    "schema manifst": "did you mean manifest?",
}
REFUSING = """
import json, sys
from typer.testing import CliRunner
from sinkscope.cli import app

for line, words in json.loads(sys.argv[1]).items():
    result = CliRunner().invoke(app, line.split())
    assert result.exit_code == 2, (line, result.output)
    assert words in result.stderr and len(result.stderr.splitlines()) == 1, (line, result.stderr)
    loaded = [name for name in ("torch", "transformers", "accelerate") if name in sys.modules]
    assert not loaded, f"{line} loads {loaded}"
"""


@pytest.mark.slow
def test_what_is_wrong_for_any_model_is_refused_without_torch(tmp_path: Path) -> None:
    """With a near name where there is one. The hub is not asked: it is offline here."""
    scanned().save(tmp_path / "run")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", REFUSING, json.dumps(REFUSED)], cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path / "hub")},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
