"""Tables for papers: intervals, units, escaping, balance, many runs, sources, lists of heads."""

from __future__ import annotations

import copy
import io
import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import command_of
from desk import hostile, scanned
from packaged import package
from scipy import stats
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.cli.export import choose_format
from sinkscope.errors import SinkscopeError
from sinkscope.present.figures.run import draw
from sinkscope.present.figures.several import caption
from sinkscope.present.html.report import render_report
from sinkscope.present.paper import formats
from sinkscope.present.paper.format import FORMATS, format_of_file
from sinkscope.present.paper.formats.latex import escape, latex_table
from sinkscope.present.paper.formats.markdown import markdown_table
from sinkscope.present.terminal.run import render_run
from sinkscope.present.text import markdown_cell
from sinkscope.runs.paper_table import PaperTable, model_labels, paper_table, sources_table
from sinkscope.runs.run import Run
from sinkscope.runs.selections import described_heads, selected_heads, selected_tokens

EVIL = r"50%_of {a} \ $x^2$ & #1 ~ [b] <script>|"


def render(table: PaperTable, form: str) -> str | bytes:
    return FORMATS[form].write(table)


def assert_balanced(text: str) -> None:
    """Braces, environments and columns of a table match; nothing special stands unescaped in a cell."""
    body = "\n".join(line for line in text.splitlines() if not line.startswith("%"))
    plain = re.sub(r"\\[\\{}&%$#_]", "", body)
    assert plain.count("{") == plain.count("}")
    assert re.findall(r"\\begin\{(\w+)\}", body) == re.findall(r"\\end\{(\w+)\}", body)[::-1]
    spec = re.search(r"\\begin\{tabular\}\{(.*)\}", body)
    assert spec
    columns = len(re.sub(r"S\[[^]]*\]", "S", spec[1]).split())
    rows = [line for line in body.splitlines() if line.endswith(r" \\")]
    rows[0] = re.sub(r"\{\$[^$]*\$\}", "{mathematics}", rows[0])
    for row in rows:
        assert len(re.findall(r"(?<!\\)&", row)) == columns - 1, row
        assert not re.search(r"(?<!\\)[#%$_^]", row), row


def test_intervals_are_students() -> None:
    run = scanned()
    table = paper_table([run], "head", ["bos_mass"])
    values = run.sequences[(run.sequences["layer"] == 1) & (run.sequences["head"] == 2)]["bos_mass"]
    low, high = stats.t.interval(0.95, len(values) - 1, values.mean(), stats.sem(values))
    row = table.frame[(table.frame["layer"] == 1) & (table.frame["head"] == 2)].iloc[0]
    assert row["bos_mass"] == pytest.approx(values.mean())
    assert (row["bos_mass_low"], row["bos_mass_high"]) == (pytest.approx(low), pytest.approx(high))


def test_no_interval_of_a_whole_number_is_a_point() -> None:
    run = scanned()
    count = run.sequences["sequence"].nunique()
    run.heads["sink_rate"], run.heads["sink_rate_sem"] = 1.0, 0.0
    frame = paper_table([run], "head", ["sink_rate", "sink_score"]).frame
    half = stats.t.ppf(0.975, count - 1) / (count + 1)
    assert (frame["sink_rate_sem"] == 0).all()
    assert frame["sink_rate_high"].to_numpy() == pytest.approx(1 + half)
    assert (frame["sink_score_high"] - frame["sink_score"]).to_numpy() == pytest.approx(
        stats.t.ppf(0.975, count - 1) * frame["sink_score_sem"].to_numpy()
    )


@pytest.mark.parametrize(("level", "keys"), [("head", ["layer", "head"]), ("layer", ["layer"]), ("model", [])])
def test_intervals_count_the_sequences_that_were_measured(level: str, keys: list[str]) -> None:
    """Three of eight sequences, as where a metric is measured on a few only: two degrees of freedom."""
    run = scanned()
    short, name = run.sequences["sequence"] >= 3, "matrix_entropy" if level != "head" else "bos_mass"
    run.sequences.loc[short, name] = np.nan
    rows = run.sequences[run.sequences[name].notna()]
    table = run.heads if level == "head" else run.layers
    if level != "model":
        found = rows.groupby(keys)[name]
        table[name], table[f"{name}_sem"] = found.mean().to_numpy(), found.sem().to_numpy()
    row = paper_table([run], level, [name]).frame.iloc[0]
    assert row[f"{name}_high"] - row[name] == pytest.approx(row[f"{name}_sem"] * stats.t.ppf(0.975, 2))


def test_models_down_metrics_across() -> None:
    runs = [scanned(), scanned("noise", text=1)]
    runs[1].manifest.model.id = "other"
    table = paper_table(runs, None, ["bos_mass", "norm_other"])
    assert table.frame["model"].tolist() == ["tiny", "other"]
    assert table.frame["bos_mass"][0] == pytest.approx(runs[0].summary.streams["text"].bos_mass.mean)
    assert table.frame["bos_mass_sem"][0] == pytest.approx(runs[0].summary.streams["text"].bos_mass.sem)
    assert table.frame["norm_other"][1] == pytest.approx(runs[1].layers["norm_other"].mean())


@pytest.mark.slow
def test_runs_of_one_model_are_told_apart() -> None:
    runs = [scanned(), scanned(dtype="bfloat16"), scanned("noise")]
    assert paper_table(runs[:2]).frame["model"].tolist() == ["tiny (float32)", "tiny (bfloat16)"]
    assert paper_table(runs).frame["model"].tolist() == ["tiny (run 1)", "tiny (bfloat16)", "tiny (run 3)"]
    runs[2].manifest.model.id = "other"
    assert paper_table(runs[1:]).frame["model"].tolist() == ["tiny", "other"]


@pytest.mark.parametrize("level", ["head", "layer", "model"])
@pytest.mark.parametrize("name", ["tiny", EVIL])
def test_latex_is_balanced(level: str, name: str) -> None:
    assert_balanced(latex_table(paper_table([hostile(scanned(), name)] * 2, level)))


def test_latex_as_printed() -> None:
    run = scanned()
    run.layers = run.layers.iloc[:2].assign(
        mean_bos_mass=[0.123456, np.nan], mean_bos_mass_sem=[0.001, np.nan], sink_heads=[1, 0]
    )
    text = latex_table(paper_table([run], "layer", ["bos_mass", "sink_heads"]))
    body = text[text.index("\\begin") :]
    assert body == (
        "\\begin{tabular}{r S[table-format=1.4(2), separate-uncertainty=true] S[table-format=1]}\n\\toprule\n"
        "layer & {first-token attention} & {sink heads} \\\\\n & {(probability)} & {(heads)} \\\\\n\\midrule\n"
        "0 & 0.1235 \\pm 0.0010 & 1 \\\\\n1 & {--} & 0 \\\\\n\\bottomrule\n\\end{tabular}\n"
    )


def test_a_ratio_over_zero_is_infinite_in_every_format() -> None:
    """siunitx stops at what is no number, unless it stands in braces."""
    run = scanned()
    run.layers = run.layers.iloc[:2].assign(norm_ratio=[math.inf, 1.5], norm_ratio_sem=[math.nan, 0.25])
    table = paper_table([run], "layer", ["norm_ratio"])
    latex = latex_table(table)
    assert "S[table-format=1.2(2), separate-uncertainty=true]" in latex
    assert "0 & {inf} \\\\\n1 & 1.50 \\pm 0.25" in latex
    assert "| 0 | inf |" in str(render(table, "markdown"))
    assert "0,inf," in str(render(table, "csv"))


def test_a_name_in_markdown_is_neither_mathematics_nor_struck_out() -> None:
    assert markdown_cell("$x$ ~~y~~ <b>|") == r"&#36;x&#36; \~\~y\~\~ &lt;b&gt;\|"


def test_words_stand_left_in_markdown() -> None:
    table = paper_table([scanned()], "head", ["bos_mass", "pattern"])
    assert markdown_table(table).splitlines()[1] == "| --- | --- | ---: | --- |"


def test_escape() -> None:
    assert escape("a_b%") == r"a\_b\%"
    assert escape('"') == r"\char34{}", "what booktabs and siunitx alone, with any encoding of fonts, can print"
    assert escape("[1]\\") == r"{[}1{]}\textbackslash{}"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="pdflatex is not at hand")
def test_latex_compiles(tmp_path: Path) -> None:
    tables = "\n".join(latex_table(paper_table([hostile(scanned(), EVIL)] * 2, level)) for level in ("layer", "model"))
    preamble = "\\documentclass{article}\n\\usepackage[T1]{fontenc}\\usepackage{textcomp,booktabs,siunitx}\n"
    (tmp_path / "t.tex").write_text(f"{preamble}\\begin{{document}}\n{tables}\n\\end{{document}}\n")
    made = subprocess.run(
        ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "t.tex"],
        cwd=tmp_path,
        capture_output=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout.decode(errors="replace")[-2000:]


def test_markdown_keeps_its_columns() -> None:
    text = str(render(paper_table([hostile(scanned(), EVIL)] * 2, "model"), "markdown"))
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1
    assert "<script>" not in text


def test_csv_and_parquet_hold_the_same() -> None:
    table = paper_table([scanned()], "head")
    text, binary = render(table, "csv"), render(table, "parquet")
    assert isinstance(text, str)
    assert isinstance(binary, bytes)
    pd.testing.assert_frame_equal(
        pd.read_csv(io.StringIO(text)), pd.read_parquet(io.BytesIO(binary)), check_dtype=False, rtol=1e-6
    )


def test_bibtex_names_every_paper_once() -> None:
    text = str(render(paper_table([scanned()], "head", ["sink_score", "sink_rate", "honor", "bos_mass"]), "bibtex"))
    assert text.count("@misc{arxiv2410-10781") == 1
    assert "author = {Gu, Xiangming and Pang, Tianyu and Du, Chao and Liu, Qian and Zhang, Fengzhuo and Du," in text
    assert " and others" not in text
    assert "title = {{When Attention Sink Emerges in Language Models: An Empirical View}}" in text
    assert all("title" in entry for entry in text.split("@")[1:])
    assert "eprint = {2504.03889}" in text
    assert "@misc{sinkscope,\n" in text, "classic styles do not know @software"
    assert text.count("{") == text.count("}")
    assert text.index("% defines sink_score, sink_rate") < text.index("@misc{arxiv2410-10781")
    assert text.endswith("% ours: bos_mass\n"), "what cites no paper stands below the entries, a line a source"
    assert "note" not in text
    assert all("author" in entry or "key = " in entry for entry in text.split("@")[1:]), "BibTeX sorts by one of them"


def test_bibtex_of_a_run_cites_every_paper_behind_its_metrics() -> None:
    """Not only those of the few metrics that a table shows where none is named."""
    found = sources_table([scanned()])
    text = str(render(found, "bibtex"))
    named = {column.name for column in found.columns}
    assert {"bos_mass", "sink_margin", "honor", "max_abs"} <= named
    assert len(set(re.findall(r"@misc\{arxiv([\d-]+)", text))) >= 8


def unit_of(runs: list[Run], level: str) -> str:
    return paper_table(runs, level, ["bos_mass"]).columns[0].unit


@pytest.mark.parametrize("level", ["head", "layer", "model"])
def test_weights_that_are_no_shares_have_no_threshold_and_another_unit(level: str) -> None:
    """Weights of relu attention have no common scale, so that neither the screen nor a table tells their sinks."""
    raw, names = scanned(), {"layer": ["sink_rate", "sink_heads"]}.get(level, ["sink_rate", "sinks_per_sequence"])
    for site in raw.manifest.attention:
        site.score = "relu"
    frame = paper_table([scanned(), raw], level, names).frame
    for name in names:
        assert frame.groupby("model", sort=False)[name].apply(lambda own: own.notna().all()).tolist() == [True, False]
        assert frame.groupby("model", sort=False)[name].apply(lambda own: own.isna().all()).tolist() == [False, True]
    assert not {"sink_rate", "sink_heads"} & {column.name for column in paper_table([raw], level).columns}
    for site in raw.manifest.attention:
        site.normalised = False
    assert unit_of([raw], level) == "unnormalised weight"
    assert unit_of([scanned(), raw], level) == "probability or unnormalised weight"
    assert unit_of([scanned()], level) == "probability"
    screen = render_run(raw)
    assert "-: attention is relu, no softmax" in screen
    assert "\nT = 48        -        -        -        - " in screen
    assert "no sink" not in screen
    assert "with a sink" not in screen


def test_heads_for_tools() -> None:
    run = scanned()
    run.heads["dormant"] = (run.heads["layer"] == 2) & (run.heads["head"] != 1)
    assert selected_heads(run, "dormant") == {"2": [0, 2, 3]}
    with pytest.raises(SinkscopeError, match="--heads"):
        selected_heads(run, "asleep")


def test_heads_without_softmax_are_not_told_from_sinks() -> None:
    """A threshold fits shares alone: weights of relu attention above it are no sinks, and weights below it no proof."""
    run = scanned()
    run.heads["sink_score"] = 0.9
    assert described_heads(run, "sink")["unknown"] == {}
    vision = run.heads.assign(stream="vision")
    run.heads = pd.concat([run.heads, vision], ignore_index=True)
    run.manifest.attention += [site.model_copy(update={"stream": "vision"}) for site in run.manifest.attention]
    for site in run.manifest.attention[3:]:
        site.score = "relu"
    every = {str(layer): [0, 1, 2, 3] for layer in range(3)}
    found = described_heads(run, "sink")
    assert (found["heads"], found["unknown"]) == ({"text": every, "vision": {}}, {"text": {}, "vision": every})
    for site in run.manifest.attention:
        site.score = "relu"
    with pytest.raises(SinkscopeError, match="--heads sink: attention is relu, no softmax, so that no threshold tells"):
        described_heads(run, "sink")
    with pytest.raises(SinkscopeError, match="tells no attention sinks: attention is relu, no softmax"):
        selected_tokens(run, "sink")


def test_heads_of_sequences_in_which_uniform_attention_passes_the_threshold_are_unknown() -> None:
    run = scanned()
    run.summary.streams["text"].uniform_alpha_0.T = 0.31
    with pytest.raises(SinkscopeError, match="uniform attention gives the first token more"):
        described_heads(run, "sink")


def test_heads_without_the_rule_of_dormancy_are_unknown() -> None:
    run = scanned()
    run.heads["dormant"] = pd.array([True] * 4 + [None] * 4 + [False] * 4, dtype="boolean")
    found = described_heads(run, "dormant")
    assert (found["heads"], found["unknown"]) == ({"0": [0, 1, 2, 3]}, {"1": [0, 1, 2, 3]})
    run.heads["dormant"] = pd.array([None] * 12, dtype="boolean")
    with pytest.raises(SinkscopeError, match=r"--heads dormant: the column of the rule honor<0.4 is empty in every"):
        described_heads(run, "dormant")


@pytest.mark.parametrize(
    ("level", "metric"),
    [
        ("head", "norm_other"),
        ("model", "pattern"),
        ("rows", "bos_mass"),
        ("head", "bos_mass_sem"),
        ("layer", "kv_group"),
        ("head", "layer"),
    ],
)
def test_what_a_level_lacks_is_refused(level: str, metric: str) -> None:
    with pytest.raises(SinkscopeError):
        paper_table([scanned()], level, [metric])


def test_a_column_without_a_value_is_said_to_be_empty() -> None:
    """The error asked whether the very name that was given was meant."""
    full, empty = scanned(), scanned()
    for table in ("heads", "sequences"):
        setattr(empty, table, getattr(empty, table).assign(bos_mass=np.nan))
    for runs, place in (([empty], "this run"), ([full, empty], "tiny \\(run 2\\)")):
        with pytest.raises(SinkscopeError, match=f"^metric 'bos_mass' has no value in {place}$"):
            paper_table(runs, "model", ["bos_mass"])


@pytest.mark.parametrize("level", ["head", "layer", "model"])
@pytest.mark.parametrize("metric", ["norm_other", "bos_mass_sem", "bos_mas", "mean_bos_mass", "max_abs_token"])
def test_a_refusal_suggests_only_what_it_would_not_refuse(level: str, metric: str) -> None:
    try:
        paper_table([scanned()], level, [metric])
    except SinkscopeError as refused:
        suggested = str(refused).partition("did you mean ")[2].rstrip("?").replace(" or ", ", ")
        for name in filter(None, suggested.split(", ")):
            assert paper_table([scanned()], level, [name])


def test_an_interval_of_zero_width_is_kept() -> None:
    run = scanned()
    run.layers = run.layers.iloc[:2].assign(mean_bos_mass=[0.5, 1.0], mean_bos_mass_sem=[0.001, 1e-13])
    text = latex_table(paper_table([run], "layer", ["bos_mass"]))
    assert "S[table-format=1.5(3), separate-uncertainty=true, retain-zero-uncertainty=true, group-digits=none]" in text
    assert "1.00000 \\pm 0.00000" in text


@pytest.mark.parametrize("form", ["latex", "markdown"])
def test_the_number_after_the_sign_is_the_standard_error_as_on_every_screen(form: str) -> None:
    run = scanned()
    error = f"{run.layers['mean_bos_mass_sem'].iloc[0]:.4f}"
    text = str(render(paper_table([run], "layer", ["bos_mass"]), form))
    assert ("\\pm " if form == "latex" else "± ") + error in text
    assert "is the standard error over sequences" in text


def test_no_error_reads_zero_that_is_none() -> None:
    """One layer's error is a hundredth of the others': it gets decimals of its own."""
    run = scanned()
    run.layers = run.layers.iloc[:3].assign(norm_ratio=[0.9, 260.0, 270.0], norm_ratio_sem=[0.004, 15.0, 16.0])
    text = latex_table(paper_table([run], "layer", ["norm_ratio"]))
    assert "0.900 \\pm 0.004" in text
    assert "260 \\pm 15" in text
    assert "S[table-format=3.3(2), separate-uncertainty=true]" in text


@pytest.mark.parametrize("sems", [[3e-7, 2e-8], [0.004, 2e-8], [3e-7, math.nan]])
def test_an_error_below_a_millionth_is_shown(sems: list[float]) -> None:
    run = scanned()
    run.layers = run.layers.iloc[:2].assign(mean_bos_mass=[0.933268, 0.5], mean_bos_mass_sem=sems)
    table = paper_table([run], "layer", ["bos_mass"])
    shown = [float(error) for error in re.findall(r"pm (\S+)", latex_table(table))]
    assert shown == [error for error in sems if not math.isnan(error)]
    if sems[0] == 3e-7:
        assert "0.9332680 ± 0.0000003" in str(render(table, "markdown"))


def test_a_caption_says_what_the_errors_are_and_headers_are_typeset() -> None:
    table = replace(paper_table([scanned()], "layer", ["sink_score", "entropy"]), caption="Sinks")
    text = latex_table(table)
    assert r"\caption{Sinks. Values after $\pm$ are the standard error over sequences.}" in text
    assert r"& {$\alpha_0$} & {$H$} \\" in text


@pytest.mark.parametrize(
    ("bos", "called"),
    slow_but(
        [(True, "BOS mass"), (False, "first-token attention"), (None, "first-token attention")], (True, "BOS mass")
    ),
)
def test_attention_on_the_first_token_is_called_bos_mass_only_where_it_is_the_bos(
    bos: bool | None, called: str
) -> None:
    run = scanned()
    run.summary.first_token.is_bos = bos
    assert f"{{{called}}}" in latex_table(paper_table([run], "layer", ["bos_mass"]))
    shown = [render_run(run), render_report([run]), draw(run, "heatmap", "svg").decode(), caption(run, "scatter")]
    for text in shown:
        assert called.lower() in text.lower()
        assert "BOS mass" not in text or bos


def test_every_built_in_format_is_one_file() -> None:
    folder = Path(formats.__file__).parent
    names = [path.stem for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    found = [FORMATS[name] for name in names]
    assert names == list(FORMATS)
    assert [each.name for each in found] == names
    endings = [ending for each in found for ending in each.extensions]
    assert len(set(endings)) == len(endings)
    table = paper_table([scanned()], "head")
    for each in found:
        assert each.extensions
        assert isinstance(each.write(table), bytes if each.binary else str)


MINE = """
from sinkscope.present.paper.format import Format
def write(table):
    return "mine: " + ", ".join(column.name for column in table.columns)
def fail(table):
    raise ZeroDivisionError("no columns")
FORMAT = Format("mine", (".mine",), write)
FAILS = Format("mine", (".mine",), fail)
EMPTY = Format("mine", (".mine",), lambda table: None)
ONE = Format("mine", ".mine", write)
BARE = Format("mine", ("mine",), write)
LOUD = Format("mine", (".MINE",), write)
NONE = "no format"
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Installs a package named `outside`, whose module is MINE, with one format: (name, object in the module)."""
    module = f"outside_{tmp_path.name.replace('-', '_')}"

    def declare(name: str, value: str) -> None:
        entry = {name: f"{module}:{value}"}
        package(tmp_path / "site", "outside", "sinkscope.export_formats", entry, **{module: MINE})
        monkeypatch.syspath_prepend(tmp_path / "site")
        command_of.cache_clear()  # the help lists the formats

    yield declare
    command_of.cache_clear()


def test_another_package_adds_a_format(tmp_path: Path, install: Callable[[str, str], None]) -> None:
    install("mine", "FORMAT")
    scanned().save(tmp_path / "run")
    arguments = ["export", str(tmp_path / "run"), "--metric", "bos_mass"]
    assert CliRunner().invoke(app, [*arguments, "--format", "mine"]).stdout == "mine: bos_mass"
    out = tmp_path / "table.mine"
    assert CliRunner().invoke(app, [*arguments, "-o", str(out)]).exit_code == 0
    assert out.read_text() == "mine: bos_mass"
    assert "parquet, mine" in " ".join(CliRunner().invoke(app, ["export", "--help"]).stdout.split())
    assert "parquet, mine" in CliRunner().invoke(app, [*arguments, "--format", "word"]).stderr


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("mine", "NONE", "outside's .*:NONE is not a Format"), ("other", "FORMAT", "is not a Format of that name"),
     ("mine", "ONE", "is not a Format whose extensions are a tuple"),
     ("mine", "BARE", "is not a Format whose extensions are a tuple of texts with their dot"),
     ("mine", "ABSENT", "outside does not load"), ("latex", "FORMAT", "declared by sinkscope and by outside")],
)  # fmt: skip
def test_a_bad_format_is_refused(name: str, value: str, said: str, install: Callable[[str, str], None]) -> None:
    install(name, value)
    with pytest.raises(SinkscopeError, match=said):
        FORMATS[name]


@pytest.mark.parametrize(("name", "value"), [("mine", "ABSENT"), ("latex", "FORMAT"), ("other", "FORMAT")])
def test_a_bad_format_leaves_the_others(
    name: str, value: str, tmp_path: Path, install: Callable[[str, str], None]
) -> None:
    install(name, value)
    sound = format_of_file(Path("table.parquet"))
    assert sound is not None
    assert sound.name == "parquet"
    with pytest.raises(SinkscopeError, match=r"outside.*name the format of table\.mine with --format"):
        format_of_file(Path("table.mine"))


def test_an_extension_is_found_in_any_case(install: Callable[[str, str], None]) -> None:
    install("mine", "LOUD")
    found = [format_of_file(Path(name)) for name in ("table.mine", "table.MINE", "table")]
    assert [form and form.name for form in found] == ["mine", "mine", None]


def test_an_extension_of_no_format_is_refused() -> None:
    for name in ("table.tx", "table.xlsx"):
        with pytest.raises(SinkscopeError, match=r"no format has this extension; give one of .*\.csv.*, or --format"):
            choose_format(None, Path(name))
    assert choose_format(None, Path("table")).name == choose_format("markdown", Path("table.tx")).name == "markdown"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("FAILS", "--format mine: outside fails: no columns"),
        ("EMPTY", "--format mine: outside returns NoneType, not str"),
    ],
)
def test_a_format_that_writes_nothing_is_named(
    value: str, said: str, tmp_path: Path, install: Callable[[str, str], None]
) -> None:
    install("mine", value)
    scanned().save(tmp_path / "run")
    refused = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--metric", "bos_mass", "--format", "mine"])
    assert (refused.exit_code, refused.stderr) == (2, f"sinkscope: error: {said}\n")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    run = str(tmp_path / "run")
    for form in ("latex", "markdown", "csv", "bibtex"):
        assert CliRunner().invoke(app, ["export", run, "--format", form]).exit_code == 0
    assert CliRunner().invoke(app, ["export", run, "--format", "parquet"]).exit_code == 2
    assert CliRunner().invoke(app, ["export", run, "--format", "word"]).exit_code == 2
    listed = json.loads(CliRunner().invoke(app, ["export", run, "--heads", "dormant"]).stdout)
    assert listed["heads"] == {}
    assert (listed["model"], listed["selection"], listed["rule"]) == ("tiny", "dormant", "honor<0.4")
    assert listed["kv_groups"] == {"0": [0, 0, 1, 1], "1": [0, 0, 1, 1], "2": [0, 0, 1, 1]}
    assert [(each["sequences"], each["seq_len"]) for each in listed["data"]] == [(8, 48)]
    assert CliRunner().invoke(app, ["export", run, "-o", str(tmp_path / "no" / "t.tex")]).exit_code == 2
    refused = CliRunner().invoke(app, ["export", run, "--heads", "sink", "--format", "csv"])
    assert refused.exit_code == 2
    assert "--heads writes a list" in refused.stderr
    for name, start in (("t.tex", b"%"), ("t.CSV", b"layer,"), ("t.parquet", b"PAR1"), ("t", b"| layer")):
        assert CliRunner().invoke(app, ["export", run, "-o", str(tmp_path / name)]).exit_code == 0
        assert (tmp_path / name).read_bytes().startswith(start)


@pytest.mark.parametrize(
    "name",
    slow_but(["=1+1", "+x", "-x", "@x", "\tx", "::error::x", "  ::error::x", "##[error]x"], "=1+1"),
)
def test_a_name_is_neither_a_formula_nor_a_command(name: str) -> None:
    """A spreadsheet opens the CSV, a CI runner reads what is printed."""
    run = scanned()
    run.manifest.model.id = name
    text = render(paper_table([run, scanned()], "model", None), "csv")
    assert any(line.startswith((f"'{name},", f'"\'{name}",')) for line in text.splitlines())
    assert "\ntiny," in text
    for form in ("csv", "latex", "markdown"):
        for line in render(paper_table([run, scanned()], "model", None), form).splitlines():
            assert not line.lstrip().startswith(("::", "##["))
    assert not render_run(run, [], width=80, color=None).lstrip().startswith(("::", "##["))


# Tables in a paper


def test_a_caption_and_a_label_make_a_table_of_their_own() -> None:
    few, many = (
        replace(paper_table([scanned()], "layer", names), caption="50 % of heads", label="tab:sinks")
        for names in (["bos_mass"], None)
    )
    text = latex_table(few)
    assert r"\caption{50 \% of heads. Values after" in text
    assert r"\label{tab:sinks}" in text
    assert [line for line in text.splitlines() if "{table" in line] == [r"\begin{table}", r"\end{table}"]
    assert r"\begin{table*}" in latex_table(many), "six metrics with intervals are wider than a column"
    assert r"\begin{table" not in latex_table(replace(few, caption=None, label=None))


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--caption", "c"], "--caption belongs to --format latex"),
        (["--label", "c", "--heads", "sink"], "--label belongs to --format latex"),
        (["--label", "a{b", "--format", "latex"], "--label 'a{b': letters, digits"),
        (["--format", "latx"], "bibtex, csv, latex, markdown, parquet, hf-dataset, duo, ids; did you mean latex?"),
        (["--heads", "streamin"], "choose one of dormant, sink, streaming; did you mean streaming?"),
        (["--level", ""], "--level '': choose one of head, layer, model"),
        (["--metric", "module"], "no metric 'module' at level layer; `sinkscope metrics` lists all"),
        (["--metric", "tr_bw"], "no metric 'tr_bw' at level layer (it is a column of smoothing)"),
    ],
)
def test_what_export_refuses(words: list[str], error: str, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    done = CliRunner().invoke(app, ["export", str(tmp_path / "run"), *words])
    assert done.exit_code == 2
    assert error in done.stderr


def test_runs_of_one_model_are_told_apart_by_what_differs() -> None:
    def run(**changes: Any) -> Any:
        made = scanned()
        made.manifest = copy.deepcopy(made.manifest)
        made.manifest.data = [data.model_copy(update=changes) for data in made.manifest.data]
        return made

    name = scanned().manifest.model.shown
    lengths = model_labels([run(seq_len=64), run(seq_len=256)])
    assert lengths == [f"{name} (T = 64)", f"{name} (T = 256)"]
    assert model_labels([run(), run()]) == [f"{name} (run 1)", f"{name} (run 2)"]
    other = run()
    other.manifest.model.dtype = "bfloat16"
    assert model_labels([run(), other])[1] == f"{name} (bfloat16)"
