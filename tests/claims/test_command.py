"""`sinkscope claims`: models and runs, what is written and read again, a claim from outside, and what is refused."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pandas as pd
import pytest
from conftest import make_model
from desk import scanned
from models import random_ids
from packaged import package
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from sinkscope.claims.claim import CLAIMS, Found, Number, chosen_claims
from sinkscope.claims.findings import judged
from sinkscope.claims.needs import CONTROLS
from sinkscope.claims.subject import Subject
from sinkscope.cli import app
from sinkscope.cli.claims import FILES
from sinkscope.errors import SinkscopeError
from sinkscope.trigger.explicit import write_explicit

OUTSIDE = Path(__file__).parents[1] / "fixtures" / "outside_claim"
FEW = ("--num-sequences", "4", "--quiet")


def claims(*words: object) -> Result:
    return CliRunner().invoke(app, ["claims", *map(str, words)])


@pytest.fixture(scope="module")
def explicit_models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A softmax that solves the task with a sink, two heads that do without, and a ReLU."""
    folder = tmp_path_factory.mktemp("explicit")
    write_explicit(folder / "one", "softmax")
    write_explicit(folder / "two", "softmax", heads=2)
    write_explicit(folder / "relu")
    return folder


TASK = ("--claim", "softmax-needs-a-sink", "--claim", "relu-needs-none", "--claim", "heads-compensate")


@pytest.mark.slow
def test_models_side_by_side(explicit_models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = claims(*(explicit_models / name for name in ("one", "two", "relu")), *TASK, *FEW, "--out", out)
    assert done.exit_code == 0, done.output
    lines = {line.split()[0]: line.split() for line in done.stdout.split("\n") if line}
    assert [lines["softmax-needs-a-sink"][place] for place in (1, 3, 5)] == ["holds", "fails", "-"]
    assert lines["relu-needs-none"][1:] == ["-", "-", "holds", "0.00"]
    assert lines["heads-compensate"][1:3] == ["-", "holds"]
    assert sorted(path.name for path in out.iterdir()) == ["claims.csv", "claims.html", "claims.md", "runs"]
    found = pd.read_csv(out / "claims.csv")
    verdicts = found[found["row"] == "verdict"]
    assert len(verdicts) == 9
    assert "the model" not in verdicts["quantity"].dropna().str.cat()
    assert "| verdict | holds | fails | not tested |" in (out / "claims.md").read_text("utf-8")
    assert "<h2>Ran-Milo 2603.11487</h2>" in (out / "claims.html").read_text("utf-8")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder in which nobody can write")
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_measured(
    explicit_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.cli.claims._put", lambda *_: pytest.fail("it was measured"))
    done = claims(explicit_models / "one", *TASK, *FEW, "--out", "/proc/claims")
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("sinkscope: error: cannot write to /proc: ")
    assert line.endswith("; give another --out")


def test_a_folder_with_other_things_is_left_alone(
    explicit_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sinkscope.cli.claims._put", lambda *_: pytest.fail("it was measured"))
    (tmp_path / "thesis.tex").touch()
    monkeypatch.chdir(tmp_path)
    for out, force in ((".", ()), (tmp_path, ("--force",))):
        done = claims(explicit_models / "one", *TASK, *FEW, "--out", out, *force)
        assert done.exit_code == 2, done.output
        (line,) = done.stderr.splitlines()
        assert line.endswith("is not empty and holds no page of claims: give another --out")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_what_was_measured_is_read_again(
    explicit_models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, words = tmp_path / "out", (explicit_models / "one", *TASK, *FEW)
    assert claims(*words, "--out", out).exit_code == 0
    before = (out / "claims.csv").read_bytes()
    again = claims(*words, "--out", out)
    assert again.exit_code == 2
    assert "claims.csv is there already" in again.stderr

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was measured again")

    monkeypatch.setattr("sinkscope.engine.scan.scan", never)
    again = claims(*words, "--out", out, "--force")
    assert again.exit_code == 0, again.output
    assert (out / "claims.csv").read_bytes() == before
    for name in FILES:
        (out / name).unlink()
    other = claims(*words[:-2], 5, "--quiet", "--out", out)
    assert other.exit_code == 2
    assert "holds a finished run with another num_sequences (4 there, 5 now); give another --out" in other.stderr
    other = claims(*words, "--dtype", "float64", "--out", out)
    assert "holds a finished run with another dtype (auto there, float64 now)" in other.stderr


LITTLE: dict[str, Any] = {"seq_len": 24, "num_sequences": 8}


@pytest.mark.slow
def test_what_is_kept_of_other_weights_is_not_read(copied: Path, tmp_path: Path) -> None:
    """Without `force` it is refused, with it measured anew. What is still of this model is read either way."""

    def subject(force: bool = False, **reading: Any) -> Subject:
        return Subject("m", str(copied), reading=LITTLE | reading, loading={"device": "cpu"}, folder=kept, force=force)

    def files() -> dict[str, bytes]:
        return {name: (kept / name).read_bytes() for name in ("controls/manifest.json", "arms/arms.json")}

    kept = tmp_path / "kept"
    first = CONTROLS.run_of(subject()), subject().arms()
    before = files()
    again = CONTROLS.run_of(subject(force=True)), subject(force=True).arms()
    assert files() == before, "nothing was measured"
    pd.testing.assert_frame_equal(again[0].heads, first[0].heads)
    assert again[1].table["loss"].tolist() == pytest.approx(first[1].table["loss"].tolist(), rel=1e-7)
    with pytest.raises(SinkscopeError, match=r"holds a finished measurement of arms with another seed \(0 there, 1"):
        subject(seed=1).arms()
    with pytest.raises(SinkscopeError, match=r"arms with another data\.spec \(prose there, code now\)"):
        subject(data="code").arms()

    weights = load_file(copied / "model.safetensors")
    weights = {name: weight * (1.5 if "layers.0" in name else 1) for name, weight in weights.items()}
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    told = r"with another model\.weights_sha256 \(\w+\.{3}\w+ there, \w+\.{3}\w+ now\); give another --out, or --force"
    with pytest.raises(SinkscopeError, match=f"controls holds a finished run {told} to replace it"):
        CONTROLS.run_of(subject())
    with pytest.raises(SinkscopeError, match=f"arms holds a finished measurement of arms {told} to replace it"):
        subject().arms()
    anew = CONTROLS.run_of(subject(force=True)), subject(force=True).arms()
    assert (anew[0].heads["bos_mass"] != first[0].heads["bos_mass"]).any()
    assert (anew[1].table["loss"] != first[1].table["loss"]).all()
    assert CONTROLS.run_of(subject()).manifest.model.weights_sha256 == anew[0].manifest.model.weights_sha256


@pytest.mark.slow
def test_a_text_file_that_has_changed_is_other_text(tiny_folder: Path, tmp_path: Path) -> None:
    """Its name is the same."""
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten " * 40, "utf-8")
    subject = partial(
        Subject, "m", str(tiny_folder), reading={"data": str(text), "seq_len": 16, "num_sequences": 8},
        loading={"device": "cpu"}, folder=tmp_path / "kept",
    )  # fmt: skip
    subject().scan("text")
    subject().arms()
    text.write_text("ten nine eight seven six five four three two one " * 40, "utf-8")
    with pytest.raises(SinkscopeError, match=r"holds a finished run with another data\..*fingerprint"):
        subject().scan("text")
    with pytest.raises(SinkscopeError, match=r"measurement of arms with another data\.fingerprint"):
        subject().arms()


def test_what_is_kept_of_a_model_object_is_not_read(tmp_path: Path) -> None:
    """Nothing tells whether it is of this object."""

    def subject() -> Subject:
        reading = {"data": random_ids(8, 20), "num_sequences": 8}
        return Subject("m", make_model(), reading=reading, folder=tmp_path)

    subject().scan("text")
    subject().arms()
    with pytest.raises(SinkscopeError, match="holds a finished run, and nothing tells whether it is of this model"):
        subject().scan("text")
    with pytest.raises(SinkscopeError, match="holds a finished measurement of arms, and nothing tells whether"):
        subject().arms()


def test_a_saved_run_is_read_and_what_it_lacks_is_not_tested(explicit_models: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ["scan", explicit_models / "one", "--num-sequences", 4, "--measure", "switch", "--out", run, "--quiet"]
    scanned = CliRunner().invoke(app, list(map(str, words)))
    assert scanned.exit_code == 0, scanned.output
    done = claims(run, "--claim", "hard-switch", "--claim", "sink-is-cheaper", *TASK[:2])
    assert done.exit_code == 0, done.output
    flat = " ".join(done.stdout.split())
    assert "hard-switch holds 1 of 1" in flat
    assert "softmax-needs-a-sink holds 0.999" in flat
    assert "sink-is-cheaper not tested the run has no table smoothing: scan with --measure switch" in flat


@pytest.mark.parametrize(
    "words", [("--seq-len", "0"), ("--data", "code"), ("--device", "nowhere"), ("--dtype", "x"), ("--revision", "y")]
)
def test_options_of_a_scan_beside_saved_runs_alone_are_refused(words: tuple[str, str], tmp_path: Path) -> None:
    """They were taken, and changed nothing."""
    scanned().save(tmp_path / "run")
    refused = claims(tmp_path / "run", *words)
    told = f"sinkscope: error: {words[0]} goes with a model that is scanned, and only run folders are named\n"
    assert (refused.exit_code, refused.stdout, refused.stderr) == (2, "", told)


def test_a_page_that_cannot_be_written_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(files: Any) -> None:
        raise SinkscopeError("cannot write claims.csv: No space left on device")

    scanned().save(tmp_path / "run")
    monkeypatch.setattr("sinkscope.cli.claims.write_files", full)
    refused = claims(tmp_path / "run", "--claim", "hard-switch", "--out", tmp_path / "page")
    assert (refused.exit_code, refused.stderr) == (
        2, "sinkscope: error: cannot write claims.csv: No space left on device\n"
    )  # fmt: skip
    assert not (tmp_path / "page").exists()


def test_a_saved_run_of_other_weights_is_not_judged_by_those_of_today(tmp_path: Path) -> None:
    """The run holds no evaluation of the task: its model is opened again."""
    model, run = tmp_path / "model", tmp_path / "run"
    write_explicit(model, "softmax")
    scanned = CliRunner().invoke(app, ["scan", str(model), "--num-sequences", "4", "--out", str(run), "--quiet"])
    assert scanned.exit_code == 0, scanned.output
    shutil.rmtree(model)
    write_explicit(model, "softmax", heads=2)
    flat = " ".join(claims(run, "--claim", "softmax-needs-a-sink").stdout.split())
    assert "softmax-needs-a-sink not tested" in flat
    assert "holds other weights than the run was made of: scan it again" in flat


def test_the_list_needs_no_model() -> None:
    shown = claims("--list")
    assert shown.exit_code == 0, shown.output
    for each in chosen_claims():
        assert f"{each.name} (" in shown.stdout
    assert max(map(len, shown.stdout.split("\n"))) <= 80


def test_a_package_brings_a_claim_in_one_file(explicit_models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "heads-are-calm" not in CLAIMS
    monkeypatch.syspath_prepend(OUTSIDE)
    assert list(CLAIMS)[-1] == "heads-are-calm"
    done = claims(explicit_models / "one", "--claim", "heads-are-calm", *FEW)
    assert done.exit_code == 0, done.output
    assert "Nobody 2999.99999\n  heads-are-calm  holds" in done.stdout


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (lambda *given: {}["nokey"], "'nokey' is missing"), (lambda *given: 3, "'int' object has no attribute"),
        (lambda *given: Found(cast(Number, 0.5)), "something else than Numbers"),
    ],
)  # fmt: skip
def test_a_claim_of_a_package_that_fails_is_named(found: Any, told: str) -> None:
    mine = replace(CLAIMS["hard-switch"], name="mine", find=found, causal=False,
                   needs=cast(Any, SimpleNamespace(of=lambda subject: None)))  # fmt: skip
    CLAIMS.add("mine", mine, "a_package")
    try:
        with pytest.raises(SinkscopeError, match=f"^--claim mine: a_package fails: .*{told}"):
            judged(mine, cast(Subject, None))
    finally:
        CLAIMS.remove("mine")


def test_a_claim_that_does_not_load_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package(tmp_path, "a_package", "sinkscope.claims", {"mine": "absent_module:CLAIM"})
    monkeypatch.syspath_prepend(tmp_path)
    said = "^--claim mine: a_package does not load: No module named 'absent_module'"
    with pytest.warns(UserWarning, match=f"{said}; it is left out$"):
        assert "mine" not in [claim.name for claim in chosen_claims()]
    assert [claim.name for claim in chosen_claims(["hard-switch"])] == ["hard-switch"]
    with pytest.raises(SinkscopeError, match=f"{said}$"):
        chosen_claims(["mine"])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), "no model and no run"),
        (("example:nothing",), "unknown example 'nothing'"),
        (("example:minilm", "--claim", "hard-swich"), "did you mean hard-switch?"),
        (("example:minilm", "--out", os.devnull), "is a file"),
    ],
)
def test_what_is_refused_in_one_line(words: tuple[str, ...], told: str) -> None:
    done = claims(*words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.strip().split("\n")) == 1
