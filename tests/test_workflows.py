"""The forge's workflows: what they may do, and that .ci/run does on any machine what they do."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
OWN = sorted(ROOT.glob(".github/workflows/*.yml"))
WORKFLOWS = [*OWN, ROOT / "examples" / "github-actions.yml"]
CHECK = ROOT / ".github" / "actions" / "check" / "action.yml"

LEFT_OUT = {
    ".ci/run": "is the full run itself",
    ".ci/clients": "installs a dozen libraries that sinkscope runs beside; every night it does",
    ".ci/lowest": "installs a second environment and runs the fast tests once more; every night it does",
    ".ci/try-wheel": "installs torch and all else once more, 2.7 minutes; every night it does, and before a release",
}
"""Scripts that a workflow runs and `.ci/run` does not, each with the reason."""


def read(path: Path) -> dict[str, Any]:
    return dict(yaml.safe_load(path.read_text("utf-8")))


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of all jobs; a job that calls another workflow has none."""
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


# What they run


def scripts_in(text: str) -> set[str]:
    """The scripts of .ci/ that a shell script calls."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return set(re.findall(r"(?:^|\s)(\.ci/[\w-]+)(?=\s|$)", "\n".join(lines)))


def unknown_to(full: str, workflow: dict[str, Any]) -> list[str]:
    """The commands of a workflow that the script `full` does not run too, nor leaves out for a reason."""
    known = scripts_in(full) | set(LEFT_OUT)
    commands = [step["run"] for step in steps(workflow) if "run" in step]
    return [command for command in commands if "\n" in command or shlex.split(command)[0] not in known]


@pytest.mark.parametrize("path", OWN, ids=name)
def test_every_step_is_a_script_that_the_full_run_runs_too(path: Path) -> None:
    """What only a forge runs stays red unseen: the site once did not build there, while .ci/run ended well."""
    assert unknown_to((ROOT / ".ci" / "run").read_text("utf-8"), read(path)) == []


def test_a_step_of_its_own_is_seen() -> None:
    runs = [".ci/lint", "ruff check .", ".ci/lint\npytest", ".ci/other", '.ci/tests "$X"', ".ci/lowest"]
    workflow = {"jobs": {"one": {"steps": [{"run": run} for run in runs]}, "two": {"uses": "./other.yml"}}}
    full = "# .ci/other\n.ci/lint\nA='b c\n  d' .ci/tests -x\necho .ci/lint.py\n"
    assert unknown_to(full, workflow) == ["ruff check .", ".ci/lint\npytest", ".ci/other"]


def test_what_is_left_out_is_left_out_and_run_elsewhere() -> None:
    commands = {shlex.split(step["run"])[0] for path in OWN for step in steps(read(path)) if "run" in step}
    full = scripts_in((ROOT / ".ci" / "run").read_text("utf-8"))
    assert set(LEFT_OUT) <= commands - full
    assert {path.name for path in (ROOT / ".ci").iterdir() if path.stat().st_mode & 0o100} == {
        script.removeprefix(".ci/") for script in commands | full
    }


def test_every_script_is_explained() -> None:
    told = re.findall(r"^\| .*?`\.ci/([\w-]+)", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.M)
    assert set(told) == {path.name for path in (ROOT / ".ci").iterdir() if path.stat().st_mode & 0o100}


def test_every_python_that_is_declared_is_tried() -> None:
    declared = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    matrix = read(ROOT / ".github" / "workflows" / "tests.yml")["jobs"]["fast"]["strategy"]["matrix"]
    assert matrix["python"] == declared


# What they may do


@pytest.mark.parametrize("path", WORKFLOWS, ids=name)
def test_a_workflow_may_only_read_and_pins_every_action(path: Path) -> None:
    """A tag of an action can be moved to other code; a commit cannot. A release alone may ask for an identity."""
    workflow = read(path)
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    more = {key: job["permissions"] for key, job in jobs.items() if "permissions" in job}
    assert more == ({"publish": {"id-token": "write"}} if path.name == "release.yml" else {})
    assert all("timeout-minutes" in job or job["uses"].startswith("./") for job in jobs.values())
    assert not [key for key, job in jobs.items() if job.get("continue-on-error")]
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert [each for each in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", each)] == []


def test_nothing_is_published_that_was_not_tested() -> None:
    jobs = read(ROOT / ".github" / "workflows" / "release.yml")["jobs"]
    assert jobs["publish"]["needs"] == ["tests", "build"]
    assert not [step for step in jobs["publish"]["steps"] if "run" in step], "no code of ours holds the identity"


def test_the_torch_of_the_workflows_is_the_one_that_is_declared() -> None:
    """Another one is replaced by the CUDA build when sinkscope is installed."""
    told = subprocess.run(
        [sys.executable, ROOT / ".ci" / "declared.py", "torch"], capture_output=True, text=True, check=True
    )
    shown = [ROOT / "examples" / "github-actions.yml", CHECK]
    named = [found for path in shown for found in re.findall(r"install '(torch[^']*)'", path.read_text("utf-8"))]
    assert named == [told.stdout.strip()] * 2


def test_a_name_that_is_not_declared_is_refused() -> None:
    command = [sys.executable, ROOT / ".ci" / "declared.py", "tor"]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_the_action_keeps_the_page_of_the_check(tmp_path: Path) -> None:
    """Its script runs with a program in sinkscope's place that writes what it is asked for and fails the check."""
    script = next(step["run"] for step in read(CHECK)["runs"]["steps"] if step.get("id") == "check")
    program = tmp_path / "sinkscope"
    program.write_text(
        '#!/bin/sh\necho "$@" >> "$ASKED"\nif [ "$1" = check ]; then\n'
        '  while [ $# -gt 0 ]; do\n    case "$1" in\n      --html) echo page > "$2" ;;\n      --out) mkdir "$2" ;;\n'
        "    esac\n    shift\n  done\n  exit 1\nfi\n"
    )
    program.chmod(0o755)
    folder = tmp_path / "sinks"
    told = {"MODEL": "m", "BASELINE": "b.json", "POLICY": "", "FOLDER": folder, "ASKED": tmp_path / "asked",
            "GITHUB_OUTPUT": tmp_path / "output", "GITHUB_STEP_SUMMARY": tmp_path / "summary",
            "PATH": f"{tmp_path}:/usr/bin:/bin"}  # fmt: skip
    done = subprocess.run([shutil.which("bash") or "bash", "-c", script], env={k: str(v) for k, v in told.items()},
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert (folder / "report.html").read_text() == "page\n"
    asked = (tmp_path / "asked").read_text().splitlines()
    assert [line.split()[0] for line in asked] == ["check", "card", "card"]
    (upload,) = [step for step in read(CHECK)["runs"]["steps"] if "upload-artifact" in step.get("uses", "")]
    assert upload["if"] == "always()"
    assert upload["with"]["path"].endswith("/sinks")


# Forms


def values(tree: Any, key: str) -> Iterator[Any]:
    """What stands under a key anywhere in a file."""
    if isinstance(tree, dict):
        yield from (tree[key] for _ in [0] if key in tree)
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from values(branch, key)


FORMS = sorted(set(ROOT.glob(".github/ISSUE_TEMPLATE/*.yml")) - {ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"})


@pytest.mark.parametrize("path", FORMS, ids=name)
def test_a_form_is_one_that_the_forge_takes(path: Path) -> None:
    form = read(path)
    assert {"name", "description", "body"} <= set(form)
    ids = list(values(form["body"], "id"))
    assert len(ids) == len(set(ids))
    for part in form["body"]:
        needs = {"markdown": {"value"}, "checkboxes": {"label", "options"}}.get(part["type"], {"label"})
        assert part["type"] in {"markdown", "textarea", "input", "checkboxes"}
        assert needs <= set(part["attributes"])
    assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_a_checklist_names_files_that_are_there() -> None:
    text = (ROOT / ".github" / "pull_request_template.md").read_text("utf-8")
    named = re.findall(r"(?:sinkscope|tests|docs)/[\w/.]*\w", text)
    assert len(named) > 15
    assert [path for path in named if "NAME" not in path and not (ROOT / path).exists()] == []


# A release's version


def checkout(folder: Path, version: str = "1.2.3", cited: str = "1.2.3", top: str = "[1.2.3] - 2025-01-31") -> Path:
    """A folder with the three files that name a version, and the script that reads them."""
    (folder / ".ci").mkdir(parents=True)
    shutil.copy(ROOT / ".ci" / "version", folder / ".ci")
    (folder / "sinkscope" / "runs").mkdir(parents=True)
    (folder / "sinkscope" / "runs" / "defaults.py").write_text(f'VERSION = "{version}"\n')
    (folder / "CITATION.cff").write_text(f"cff-version: 1.2.0\nversion: {cited}\n")
    (folder / "CHANGELOG.md").write_text(f"# Changelog\n\n## {top}\n\n- New.\n\n## [1.2.2] - 2024-01-31\n")
    return folder


def said(root: Path, *words: str) -> list[str]:
    """The lines of a refusal; none where all agrees."""
    done = subprocess.run(
        [sys.executable, root / ".ci" / "version", *words], capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    assert done.returncode == bool(lines)
    return lines


def test_a_release_whose_files_agree_may_go_out(tmp_path: Path) -> None:
    assert said(checkout(tmp_path / "dated"), "v1.2.3") == []
    assert said(checkout(tmp_path / "meanwhile", top="[1.2.3] - unreleased")) == []
    assert said(ROOT) == []


@pytest.mark.parametrize(
    ("given", "tag", "refusal"),
    [
        ({}, "v1.2.4", "the tag is v1.2.4, not v1.2.3"),
        ({}, "1.2.3", "the tag is 1.2.3, not v1.2.3"),
        ({"top": "[1.2.3] - unreleased"}, "v1.2.3", "CHANGELOG.md: 1.2.3 is 'unreleased', not a date as 2025-01-31"),
        ({"top": "[1.2.3] - 2025-02-30"}, "v1.2.3", "CHANGELOG.md: 1.2.3 is '2025-02-30', not a date as 2025-01-31"),
        ({"top": "[1.2.4] - 2025-01-31"}, "v1.2.3", "CHANGELOG.md: the topmost section is 1.2.4, not 1.2.3"),
        ({"top": "[1.2.3]"}, "v1.2.3", "CHANGELOG.md: 1.2.3 is '', not a date as 2025-01-31"),
        ({"top": "[1.2.4]"}, "v1.2.3", "CHANGELOG.md: the topmost section is 1.2.4, not 1.2.3"),
        ({"cited": "1.2.2"}, "v1.2.3", "CITATION.cff: version 1.2.2, not 1.2.3"),
    ],
)
def test_a_release_whose_files_differ_is_refused(given: dict[str, str], tag: str, refusal: str, tmp_path: Path) -> None:
    assert said(checkout(tmp_path, **given), tag) == [refusal]
