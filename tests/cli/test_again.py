"""Measuring a run again: `check MODEL --baseline` and `compare RUN MODEL` repeat the run's request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import Scan
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.runs.run import load_run


def command(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [("--bos", "always", "--bos", "never"), pytest.param(("--spectra", 1), marks=pytest.mark.slow), ("--seed", 3)],
)
def test_check_asks_the_model_what_the_run_was_asked(
    options: tuple[object, ...], tiny_folder: Path, scan_cli: Scan, tmp_path: Path
) -> None:
    outcome = scan_cli(tiny_folder, "--data", "prose", *options)
    assert command("baseline", outcome.folder, "-o", tmp_path / "b.json").exit_code == 0
    policy = tmp_path / "policy.toml"
    policy.write_text("[[rules]]\nmetric = 'matrix_entropy'\nlevel = 'layer'\nmax_change = 0.001\n", "utf-8")
    result = command("check", tiny_folder, "--baseline", tmp_path / "b.json", "--policy", policy)
    assert result.exit_code == 0, result.output
    assert "other token sequences" not in result.output
    assert ("2 rules," if "--bos" in options else "1 rule,") in result.output


def test_the_manifest_holds_the_whole_request(tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(
        tiny_folder, "--data", "code", "--data", "random", "--bos", "never", "--seed", 5, "--epsilon", 0.4,
        "--dormant-rule", "ahon<1", "--spectra", 1, "--smoothing", "--batch-size", 1, "--dtype", "float64",
        "--no-self-check", "--device", "cpu",
    )  # fmt: skip
    asked = load_run(outcome.folder).manifest.request
    assert asked.as_dict() == {
        "model": str(tiny_folder), "name": None, "revision": None, "adapter": None, "data": ["code", "random"],
        "given": None, "bos": ["never"], "first": [], "prepend": [], "generate": None,
        "images": None, "audio": None, "prompt": None,
        "seq_len": 32, "lengths": None, "num_sequences": 2, "seed": 5, "epsilon": 0.4, "dormant_rule": "ahon<1",
        "spectra": 1, "measures": ["smoothing"], "window": 64, "sinks": 4, "batch_size": 1, "dtype": "float64",
        "device": "cpu", "device_map": None, "trust_remote_code": False, "allow_pickle": False, "self_check": False,
    }  # fmt: skip
