"""An empty path, as an unset variable of a shell leaves it, is refused: Python takes it for the working folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from sinkscope.cli import app

RUN = str(Path(__file__).parents[1] / "fixtures" / "v0_1" / "smoothing")


def refused(*words: object) -> str:
    """What a command says that must end with exit code 2 and one line, and leave the working folder as it is."""
    before = sorted(Path.cwd().iterdir())
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert (done.exit_code, done.stdout) == (2, ""), done.stderr
    assert done.stderr.count("\n") == 1
    assert sorted(Path.cwd().iterdir()) == before
    return done.stderr.removeprefix("sinkscope: error: ").rstrip("\n")


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder that a command would take for its own."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("scan", "example:gemma-3-270m", "--out", ""), "--out"),
        (("scan", "example:gemma-3-270m", "--out="), "--out"),
        (("scan", "example:gemma-3-270m", "--metrics", ""), "--metrics"),
        (("scan", "--models", "", "--quiet"), "--models"),
        (("scan", "example:gemma-3-270m", "-o", ""), "-o"),
        (("arms", "example:gemma-3-270m", "--arm", "keys:first1", "--run", ""), "--run"),
        (("arms", "example:gemma-3-270m", "--arm", "keys:first1", "--out", ""), "--out"),
        (("track", "a1", "a2", "--out", ""), "--out"),
        (("watch", "--out", "", "--", "x.py"), "--out"),
        (("report", RUN, "-o", ""), "-o"),
        (("card", RUN, "--badge", ""), "--badge"),
        (("compare", RUN, RUN, "--csv", ""), "--csv"),
        (("check", RUN, "--baseline", RUN, "--html", ""), "--html"),
        (("trigger", "train", "--out", ""), "--out"),
        (("figures", "lampert", RUN, "-o", ""), "-o"),
        (("plot", RUN, "--figure", "heatmap", "-o", ""), "-o"),
        (("claims", RUN, "--out", ""), "--out"),
        (("metrics", "--run", ""), "--run"),
    ],
    ids=" ".join,
)
def test_an_empty_path_is_refused(words: tuple[str, ...], option: str) -> None:
    assert refused(*words).startswith(f"{option} '': a path is needed (sinkscope {words[0]}")


@pytest.mark.parametrize(
    "words",
    [
        ("show", ""), ("scan", ""), ("scan", "--quiet", ""), ("compare", RUN, ""), ("check", "", "--baseline", RUN),
        ("trigger", "explicit", ""),
    ],
    ids=" ".join,
)  # fmt: skip
def test_an_empty_argument_is_refused(words: tuple[str, ...]) -> None:
    assert refused(*words).startswith("an argument is empty: a name or a path is needed (sinkscope ")


def test_an_empty_baseline_is_refused() -> None:
    assert refused("check", RUN, "--baseline", "") == "--baseline '': no such file or run folder"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_is_refused(name: str) -> None:
    told = refused("scan", "example:gemma-3-270m", "--name", name, "--out", "run")
    assert told == f"--name {name!r}: a name that a table can show is needed"


def test_the_working_folder_and_a_programs_own_words_pass() -> None:
    assert refused("show", ".").startswith(". is not a run folder")
    assert refused("watch", "--out", "run", "--", "absent.py", "").startswith("absent.py is no file")
    assert refused("scan", "example:gemma-3-270m", "--out", ".", "--prompt", "").startswith("--prompt is the text")


@pytest.mark.parametrize("margin", ["=1", " = 1", "bos_mass", "bos_mass=", "bos_mass=0", "bos_mass=nan", "bos_mass=-1"])
def test_a_margin_that_makes_no_test_is_refused_before_a_model_is_scanned(margin: str) -> None:
    told = refused("compare", "no/such-model", "no/other-model", "--equivalence-margin", margin)
    assert told.startswith(f"--equivalence-margin {margin!r}: give METRIC=MARGIN, a number above 0")


def test_a_metric_has_one_margin() -> None:
    margins = ("--equivalence-margin", "bos_mass=1", "--equivalence-margin", "bos_mass=2")
    assert refused("compare", RUN, RUN, *margins).endswith("bos_mass has a margin already")


def test_a_badge_is_an_svg_image() -> None:
    assert refused("card", RUN, "--badge", "x.png") == "--badge x.png: a badge is an SVG image; name it FILE.svg"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("-o", "x"), "--out x: the extension says how the figure is written; give .png, .svg, .pdf"),
        (("-o", "x.gif"), "a figure is written as .png, .svg, .pdf, not 'gif'"),
        (("-o", "x.png", "--size", "pages"), "--size 'pages': choose one of column, page; did you mean page?"),
    ],
)
def test_a_figure_that_cannot_be_written_is_refused_before_the_model_is_loaded(
    words: tuple[str, ...], told: str
) -> None:
    attention = ("--figure", "attention", "--layer", 0, "--head", 0, "--text", "one two")
    assert refused("plot", "absent", *attention, *words) == told
    if words[0] == "-o" and words[1] == "x.gif":
        assert refused("figures", "trigger", "absent", "-o", "new", "--format", "gif") == told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            ("plot", RUN, "--figure", "attention", "--text", "", "-o", "x.png"),
            "--text '': a text that the model can read",
        ),
        (("report", RUN, "--maps", "clearest", "--text", " "), "--text ' ': a text that the model can read is needed"),
        (("claims", "--list", RUN), f"--list lists claims and tests none: leave out {RUN}, or --list"),
        (("figures", "trigger", "x", "-o", "F", "--num-sequences", "0"), "--num-sequences 0: at least 1 is needed"),
        (("track", "a1", "a2", "--out", RUN), f"{RUN} is the folder of a run: give another --out"),
    ],
    ids=lambda words: words[0],
)
def test_words_that_cannot_be_meant_are_refused(words: tuple[str, ...], told: str) -> None:
    assert refused(*words).startswith(told)


def test_relu_has_no_error() -> None:
    told = refused("trigger", "explicit", "out", "--error", "0")
    assert told == "--error goes with --attention softmax: the solutions with ReLU are exact"
