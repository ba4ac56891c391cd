"""examples/my_metric.py: a user's own metrics, from the command line and from Python, in every table and command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from models import random_ids, tiny
from typer.testing import CliRunner

import sinkscope
from sinkscope.cli import app
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy, Rule
from sinkscope.metrics.extension import functions_in
from sinkscope.present.figures.run import draw
from sinkscope.runs.schema.base import to_json

FILE = Path(__file__).parents[2] / "examples" / "my_metric.py"
IDS = random_ids(3, 24)


def measured(**options: Any) -> sinkscope.Run:
    return sinkscope.scan(tiny("llama", num_hidden_layers=2), data=IDS, self_check=False, **options)


def call(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture(scope="module")
def run() -> sinkscope.Run:
    return measured(metrics=functions_in(FILE))


def test_its_numbers_are_what_it_says(run: sinkscope.Run) -> None:
    """local_mass is the sum of two columns of sinkscope's; first_peak a share of one vector."""
    np.testing.assert_allclose(run.heads["local_mass"], run.heads["self_mass"] + run.heads["previous_mass"], rtol=1e-6)
    assert run.layers["first_peak"].between(1 / np.sqrt(64), 1).all()
    means = run.heads.groupby("layer")["local_mass"].mean().to_numpy()
    np.testing.assert_allclose(run.layers["mean_local_mass"], means, rtol=1e-6)
    of_heads = run.sequences["head"].notna()
    values = run.sequences[of_heads].groupby(["layer", "head"])["local_mass"]
    np.testing.assert_allclose(run.heads["local_mass_sem"], values.sem(), rtol=1e-6)
    assert run.sequences.loc[~of_heads, "first_peak"].notna().all()


def test_everything_else_is_as_without_it(run: sinkscope.Run) -> None:
    plain = measured()
    for name in ("heads", "layers", "sequences"):
        more = set(getattr(run, name)) - set(getattr(plain, name))
        assert more
        assert getattr(run, name).drop(columns=list(more)).equals(getattr(plain, name)), name
    assert not plain.manifest.metrics
    assert to_json(run.summary) == to_json(plain.summary)


def test_the_manifest_defines_it(run: sinkscope.Run) -> None:
    own = run.manifest.metrics
    assert set(own) == {"local_mass", "first_peak"}
    assert own["local_mass"].unit == "probability"
    assert own["first_peak"].source == "ours, after Sun et al. 2402.17762"
    assert own["local_mass"].code_sha256 == own["first_peak"].code_sha256
    for name, column in own.items():
        assert run.manifest.conventions[name] == column.formula


def test_the_command_prints_its_definition(run: sinkscope.Run, tmp_path: Path) -> None:
    run.save(tmp_path / "run")
    of_file = call("metrics", "local_mass", "--metrics", FILE)
    assert "  local_mass: probability, [0, 1]\n      Mean over queries i >= 1 of A[i,i] + A[i,i-1]" in of_file
    assert call("metrics", "local_mass", "--run", tmp_path / "run") == of_file
    every = json.loads(call("metrics", "--run", tmp_path / "run", "--json"))
    assert [column["name"] for column in every[-2:]] == ["local_mass", "first_peak"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["local_mass"], "no column 'local_mass': `sinkscope metrics` lists them all, --run RUN also"),
        (["--metrics", "nonesuch.py"], "--metrics nonesuch.py: No such file"),
        (["--run", "nonesuch"], "no such run folder: nonesuch"),
        (["--run", "nonesuch", "--metrics", str(FILE)], "give one of them"),
    ],
)
def test_a_definition_that_cannot_be_printed(words: list[str], said: str) -> None:
    refused = CliRunner().invoke(app, ["metrics", *words])
    assert refused.exit_code == 2
    assert said in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


@pytest.mark.slow
def test_from_the_command_line_through_every_command(tiny_folder: Path, tmp_path: Path) -> None:
    out, sinks, policy = tmp_path / "run", tmp_path / "sinks.json", tmp_path / "policy.toml"
    short = ("--seq-len", 16, "--num-sequences", 2, "--no-self-check", "--quiet")
    call("scan", tiny_folder, "--metrics", FILE, *short, "--out", out)
    run = sinkscope.load_run(out)
    assert {"local_mass", "local_mass_sem"} <= set(run.heads)
    compared = json.loads(call("compare", out, out, "--metric", "local_mass", "--metric", "first_peak", "--json"))
    assert {row["metric"] for row in compared["layers"]} == {"local_mass", "first_peak"}
    assert "2402.17762" in call("export", out, "--metric", "first_peak", "--format", "bibtex")
    assert "(probability)" in call("export", out, "--level", "head", "--metric", "local_mass")
    call("plot", out, "--figure", "heatmap", "--metric", "local_mass", "-o", tmp_path / "local.svg")
    assert b"local mass (probability)" in (tmp_path / "local.svg").read_bytes()
    assert (tmp_path / "local.svg").read_bytes() == draw(run, "heatmap", "svg", metric="local_mass")
    call("baseline", out, "-o", sinks)
    policy.write_text("rules = [{metric='local_mass', level='head', max_change=0.01}]\n", "utf-8")
    judged = call("check", tiny_folder, "--baseline", sinks, "--policy", policy, "--metrics", FILE, "--quiet")
    assert judged.startswith("passed")


@pytest.mark.slow
def test_the_gate_catches_it_when_it_moves(run: sinkscope.Run) -> None:
    policy = Policy(rules=[Rule(metric="local_mass", level="head", max_change=0.01)])
    baseline = sinkscope.baseline_of(run)
    moved = measured(metrics=[FILE])
    moved.sequences["local_mass"] += 0.02
    assert check(run, baseline, policy).passed
    assert {breach.metric for breach in check(moved, baseline, policy).breaches} == {"local_mass"}
