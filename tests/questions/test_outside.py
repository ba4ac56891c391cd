"""A package beside sinkscope brings whole questions: nothing of sinkscope knows their names."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from sinkscope.runs.questions import Option, Question

PACKAGE = Path(__file__).parents[1] / "fixtures" / "outside_question"


def python(*words: object, outside: bool = True) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process that finds the package, as if pip had installed it."""
    paths = [*([str(PACKAGE)] if outside else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def sinkscope(*words: object, outside: bool = True) -> subprocess.CompletedProcess[str]:
    return python("-m", "sinkscope", *words, outside=outside)


SESSION = """
import sys
import sinkscope
from sinkscope.cli import main
from sinkscope.tables.write_catalogue import catalogue_texts

model, folder = sys.argv[1:]
text = dict(data="random", num_sequences=3, seq_len=20)
run = sinkscope.scan(model, measure=["steadiness", "bare"], bar=0.15, **text)
again = sinkscope.scan(model, measure="steadiness", bar=0.15, **text)
shares = [each.measured["steadiness"].steady_share.round(6).tolist() for each in (again, run)]
assert shares[0] == shares[1]
asked = run.manifest.request.of_model("other")
assert asked.options["bar"] == 0.15 and asked.measures == ("bare", "steadiness")

own = {path: text for path, text in catalogue_texts().items() if "outside_question" in str(path)}
assert len(own) == 2 and all(path.read_text("utf-8") == text for path, text in own.items())

words = "--data random --num-sequences 3 --seq-len 20 --measure steadiness --measure bare --bar 0.15"
sys.argv = ["sinkscope", "scan", model, *words.split(), "--out", folder]
main()
"""
"""Reads the package from Python, writes its definitions, and runs the scan that the other tests read: in one process,
since each that runs a model starts for seconds."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of the package's questions. Python's own views of it are checked on the way: `SESSION`."""
    from models import tiny

    folder = tmp_path_factory.mktemp("outside")
    tiny("llama", num_hidden_layers=2).save_pretrained(folder / "tiny")
    done = python("-c", SESSION, folder / "tiny", folder / "run")
    assert done.returncode == 0, done.stderr
    assert re.search(r"Steadiness: all sequences agree on \d of 8 heads\.", done.stdout)
    return folder / "run"


@pytest.mark.slow
def test_its_tables_hold_what_it_declares(run: Path) -> None:
    table, heads = pd.read_csv(run / "steadiness.csv"), pd.read_csv(run / "heads.csv")
    assert list(table) == ["stream", "layer", "head", "module", "steady_alpha", "steady_alpha_sem", "steady_share"]
    np.testing.assert_allclose(table["steady_alpha"], heads["sink_score"], rtol=1e-6)
    sequences = pd.read_parquet(run / "sequences.parquet").dropna(subset="head")
    above = (sequences["steady_alpha"] > 0.15).groupby([sequences["layer"], sequences["head"]]).mean()
    np.testing.assert_allclose(table["steady_share"], above, rtol=1e-6)
    bare = pd.read_csv(run / "bare.csv")
    assert list(bare) == ["stream", "layer", "head", "module", "last_on_first", "last_on_first_sem"]
    assert bare["last_on_first"].between(0, 1).all()


@pytest.mark.slow
def test_its_option_and_its_code_stand_in_the_manifest(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text("utf-8"))
    assert manifest["request"]["bar"] == 0.15
    assert manifest["request"]["measures"] == ["bare", "steadiness"]
    assert len(manifest["metrics"]["steady_alpha"]["code_sha256"]) == 64
    assert manifest["conventions"]["steady_share"] == "Share of sequences whose alpha_0 is above B."


@pytest.mark.slow
def test_its_option_is_checked_as_those_of_sinkscope(run: Path) -> None:
    model = run.parent / "tiny"
    for words, told in (
        (("--measure", "steadiness", "--bar", 2), "error: --bar 2.0: at most 1 is possible"),
        (("--bar", 0.1), "error: --bar belongs to --measure steadiness: ask that too, or leave it out"),
        (("--measure", "steadines"), "did you mean steadiness"),
    ):
        done = sinkscope("scan", model, *words, "--out", run.parent / "none")
        assert done.returncode == 2
        assert told in done.stderr
        assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_it_is_shown_by_every_command(run: Path, tmp_path: Path) -> None:
    assert "Steadiness: all sequences agree" in sinkscope("show", run).stdout
    report = sinkscope("report", run, "-o", tmp_path / "report.html")
    assert report.returncode == 0, report.stderr
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<h3>Steady sinks, one dot a head</h3>" in page
    assert '"steady_alpha"' in page
    figure = sinkscope("plot", run, "--figure", "steady", "-o", tmp_path / "steady.png")
    assert figure.returncode == 0, figure.stderr
    assert figure.stdout.startswith("Steady sinks, one mark a head.")
    assert (tmp_path / "steady.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_it_is_documented_by_every_command() -> None:
    usage = re.sub(r"\s+", " ", sinkscope("scan", "--help").stdout)
    assert "steadiness do all sequences agree on a head's sink?" in usage
    assert "--bar B Least alpha_0 of a sequence that counts. For --measure steadiness." in usage
    told = sinkscope("metrics", "steady_share").stdout
    assert "steadiness.csv (scan --measure steadiness): one row per (stream, layer, head)" in told
    assert "B is the bar (--bar)." in told
    assert "Address:" not in told, "the pages of sinkscope do not define it"
    columns = json.loads(sinkscope("schema", "steadiness").stdout)["columns"]
    assert [each["name"] for each in columns][-3:] == ["steady_alpha", "steady_alpha_sem", "steady_share"]
    bar = json.loads(sinkscope("schema", "request").stdout)["properties"]["bar"]
    assert bar["description"] == "Least alpha_0 of a sequence that counts. For --measure steadiness."
    assert " steady," in re.sub(r"\s+", " ", sinkscope("plot", "--help").stdout)


@pytest.mark.slow
def test_without_the_package_the_run_says_what_is_missing(run: Path) -> None:
    done = sinkscope("show", run, outside=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "bar" in done.stderr or "bare" in done.stderr


@pytest.mark.parametrize(
    ("given", "told"),
    [("0.1", "a number is needed"), (True, "a number is needed"), (-0.1, "at least 0 is needed"), (1.1, "at most 1")],
)
def test_an_option_refuses_what_it_does_not_take(given: object, told: str) -> None:
    from sinkscope.errors import SinkscopeError

    with pytest.raises(SinkscopeError, match=f"^--bar .*: .*{told}"):
        Option("bar", 0.3, "What it is.", least=0, most=1).read(given)


def test_a_question_of_a_module_that_is_no_folder_is_refused() -> None:
    from sinkscope.errors import SinkscopeError

    with pytest.raises(SinkscopeError, match=r"--measure mine: json\.decoder is no folder of modules"):
        Question("mine", "what?", "json.decoder", ()).part("measure")


def test_a_question_without_parts_offers_none() -> None:
    question = Question("bare", "why?", "json", ())
    assert question.part("section") is None
    assert question.columns == ()
