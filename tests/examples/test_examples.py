"""The files people copy: runs the workflow's steps and the release script with a tiny model in place of Gemma."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

EXAMPLES = Path(__file__).parents[2] / "examples"
MODEL = "example:gemma-3-270m"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash is not installed")


@pytest.fixture
def workplace(tmp_path: Path, tiny_folder: Path) -> Path:
    """A folder with a model, and `sinkscope` and a `pip` that only notes what it is asked for on its PATH."""
    shutil.copytree(tiny_folder, tmp_path / "model")
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "sinkscope").write_text(f'#!/bin/sh\nexec {sys.executable} -m sinkscope "$@"\n')
    (tools / "pip").write_text('#!/bin/sh\necho "$@" >> pip.log\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    return tmp_path


def bash(folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs bash there as GitHub does (-e, pipefail)."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("GITHUB_")}
    paths = {"PATH": f"{folder / 'tools'}:{os.environ['PATH']}", "PYTHONPATH": str(EXAMPLES.parent)}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", *words]
    return subprocess.run(
        command, cwd=folder, env=ours | paths | variables, capture_output=True, text=True, check=False
    )


def spoil(model: Path) -> None:
    """Turns one head off: its columns of the output projection are zero."""
    path = model / "model.safetensors"
    weights = load_file(path)
    name = next(name for name in weights if name.endswith("layers.1.self_attn.o_proj.weight"))
    weights[name][:, :16] = torch.zeros(())
    save_file(weights, path, {"format": "pt"})


@pytest.mark.slow
def test_the_release_script(workplace: Path) -> None:
    script = str(EXAMPLES / "pre-release.sh")
    first = bash(workplace, script, "model")
    assert first.returncode == 0, first.stderr
    assert "wrote sinks.json: commit it" in first.stdout
    assert bash(workplace, script, "model").returncode == 0
    spoil(workplace / "model")
    failed = bash(workplace, script, "model")
    assert failed.returncode == 1
    assert failed.stdout.startswith("FAILED")
    assert (workplace / "sinks.xml").is_file()
    assert bash(workplace, script).returncode != 0, "a model must be named"
    assert bash(workplace, script, "nothing").returncode == 2


def steps() -> list[dict[str, Any]]:
    workflow = yaml.safe_load((EXAMPLES / "github-actions.yml").read_text("utf-8"))
    assert workflow[True] == ["push", "pull_request"], "YAML 1.1 reads the key `on` as true; GitHub does not"
    assert workflow["permissions"] == {"contents": "read"}
    return list(workflow["jobs"]["sinks"]["steps"])


@pytest.mark.slow
def test_the_workflow_runs(workplace: Path) -> None:
    """Every `run:` block in order; the check fails the job for a changed model and fills the step's summary."""
    made = bash(workplace, "-c", "sinkscope baseline model -o sinks.json")
    assert made.returncode == 0, made.stderr
    summary = workplace / "summary.md"
    variables = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary)}
    blocks = [step["run"].replace(MODEL, "model") for step in steps() if "run" in step]
    for block in blocks:
        done = bash(workplace, "-c", block, **variables)
        assert done.returncode == 0, done.stderr
    assert "sinkscope[examples]" in (workplace / "pip.log").read_text()
    assert summary.read_text().startswith("### sinkscope check: passed")
    spoil(workplace / "model")
    failed = bash(workplace, "-c", blocks[-1], **variables)
    assert failed.returncode == 1
    assert "::error title=" in failed.stdout
    assert "### sinkscope check: failed" in summary.read_text()


def test_the_workflow_keeps_the_report_of_a_failure() -> None:
    last = steps()[-1]
    assert last["if"] == "always()"
    assert last["with"]["path"].split() == ["sinks.xml", "sinks.html"]
    assert all("uses" in step or "run" in step for step in steps())
    python = next(step for step in steps() if "setup-python" in step.get("uses", ""))
    assert python["with"]["cache-dependency-path"], "setup-python fails where no requirements file is found to hash"


ACTION = EXAMPLES.parent / ".github" / "actions" / "check" / "action.yml"


@pytest.mark.slow
def test_the_action_runs(workplace: Path) -> None:
    """Every `run:` block in order, with its variables as GitHub fills them in; the report is kept where it fails."""
    made = bash(workplace, "-c", "sinkscope baseline model -o sinks.json")
    assert made.returncode == 0, made.stderr
    summary, output = workplace / "summary.md", workplace / "output"
    blocks = [step for step in yaml.safe_load(ACTION.read_text("utf-8"))["runs"]["steps"] if "run" in step]
    given = {"inputs.model": "model", "inputs.baseline": "sinks.json", "github.action_path": str(ACTION.parent)}

    def run(temporary: str) -> subprocess.CompletedProcess[str]:
        for step in blocks:
            filled = {
                name: re.sub(r"\$\{\{ (.+?) }}", lambda m: {"runner.temp": temporary, **given}.get(m[1], ""), text)
                for name, text in step.get("env", {}).items()
            }
            filled |= {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "GITHUB_OUTPUT": str(output)}
            done = bash(workplace, "-c", step["run"], **filled)
        return done

    passed = run("first")
    assert passed.returncode == 0, passed.stderr
    installed = (workplace / "pip.log").read_text().splitlines()
    assert installed[-1] == f"install {ACTION.parent}/../../..[examples]"
    assert summary.read_text().startswith("### sinkscope check: passed")
    assert "## Attention sinks" in summary.read_text()
    assert output.read_text() == "folder=first/sinks\n"
    kept = {"report.html", "badge.svg", "card.md", "sinks.xml", "run"}
    assert {path.name for path in (workplace / "first" / "sinks").iterdir()} == kept
    spoil(workplace / "model")
    failed = run("second")
    assert failed.returncode == 1
    assert "### sinkscope check: failed" in summary.read_text()
    assert {path.name for path in (workplace / "second" / "sinks").iterdir()} == kept


def test_no_input_of_the_action_becomes_a_command_and_every_action_is_pinned() -> None:
    action = yaml.safe_load(ACTION.read_text("utf-8"))
    used = [step["uses"] for step in action["runs"]["steps"] if "uses" in step]
    assert used
    assert all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each) for each in used)
    for step in action["runs"]["steps"]:
        assert "${{" not in step.get("run", ""), "an input in a script would be run as a part of it"
    torch = re.search(r'"(torch[^"]+)"', (EXAMPLES.parent / "pyproject.toml").read_text("utf-8"))
    assert torch is not None
    assert f"'{torch[1]}'" in action["runs"]["steps"][0]["run"]


def test_the_page_s_table_of_the_gate_has_the_rows_of_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    scenes = importlib.import_module("gate_power").scenes(layers=18, heads=4)
    page = (EXAMPLES.parent / "docs" / "commands" / "check.md").read_text("utf-8")
    rows = re.findall(r"^\| ([^|]+) \| (\d+) \| \d+ \|$", page, re.M)
    assert rows == [(group, str(count)) for group, count in Counter(scene.group for scene in scenes).items()]
    assert f"{len(scenes) + 1} scans" in page
