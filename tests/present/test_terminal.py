"""What a person sees, from a run made by hand: literal screens at 80 columns, narrow, wide, with and without colour."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from desk import scanned
from small_run import make_run

from sinkscope.checkpoints.examples import EXAMPLES
from sinkscope.comparison.compare_runs import compare
from sinkscope.errors import SinkscopeError
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.present.terminal.metrics import SYMBOLS, metric_list, render_examples, render_metrics
from sinkscope.present.terminal.run import render_models, render_run
from sinkscope.present.terminal.table import as_text, table
from sinkscope.present.text import first_token, printable
from sinkscope.runs.dormancy import check_rule
from sinkscope.runs.paper_table import paper_table
from sinkscope.runs.per_sequence import chosen_metrics
from sinkscope.trigger.screen import render_study

SCREEN = """\
tiny  TinyModel, 2 M parameters, float32 on cpu
prose: 4 sequences of 32 tokens
first token: '<s>' (id 1), the tokenizer's BOS

Attention sink: 3 of 6 heads.
No massive activation.

sink rate, % of (sequence, head) with alpha_0 > eps
        eps 0.2  eps 0.3  mean alpha_0  uniform alpha_0
T = 32     50.0     50.0         0.400            0.127

BOS mass, percent: layers down, heads across
        0  1  2
    0   . 17 33
    1  50 67 83  sliding:16

most BOS mass, 4 with a sink (mean ± standard error over sequences)
layer.head       bos_mass  alpha_0  margin, nats  entropy, nats  honor  pattern
1.2         0.833 ± 0.010    0.833          1.50           0.25   1.30  mixed
1.1         0.667 ± 0.010    0.667          1.50           0.25   1.30  mixed
1.0         0.500 ± 0.010    0.500          1.50           0.25   1.30  mixed
0.2         0.333 ± 0.010    0.333          1.50           0.25   0.30  mixed
0.1         0.167 ± 0.010    0.167          1.50           0.25   0.30  mixed
0.0         0.000 ± 0.010    0.000          1.50           0.25   0.30  mixed
bos_mass: mean attention of queries 1 on to the first token; alpha_0 (column
sink_score): of all queries; margin (sink_margin): its log odds; entropy: mean
over queries; honor: output norm / mean of the layer; pattern: sink where
bos_mass >= 0.5; `sinkscope metrics NAME` has each formula

dormant heads (honor<0.4): 0.0, 0.1, 0.2

written to runs/tiny: heads.csv, layers.csv
next: sinkscope report runs/tiny -o tiny.html
"""


def test_the_screen_at_80_columns() -> None:
    files = [Path("runs/tiny/heads.csv"), Path("runs/tiny/layers.csv")]
    assert render_run(make_run(), files, width=80) == SCREEN
    assert render_run(make_run(), width=80) == SCREEN.partition("\nwritten to")[0], "no blank line at its end"


@pytest.mark.parametrize(
    ("text", "is_bos", "said"),
    [
        ("<bos>", True, "the tokenizer's BOS\n"),
        ("[CLS]", True, "the tokenizer's CLS, which stands for its BOS\n"),
        ("The", False, "not the tokenizer's BOS\n"),
    ],
)
def test_the_first_token_is_called_what_it_is(text: str, is_bos: bool, said: str) -> None:
    run = make_run()
    run.summary.first_token = run.summary.first_token.model_copy(update={"text": text, "is_bos": is_bos})
    assert f"first token: '{text}' (id 1), {said}" in render_run(run, width=80)


@pytest.mark.parametrize(("text", "said"), [("1", "id 1\n"), ("first position", "first position\n")])
def test_without_a_tokenizer_the_first_token_has_an_id_or_a_name(text: str, said: str) -> None:
    run = scanned()
    facts = {"id": 1, "text": text, "is_bos": None}
    run.summary.first_token = run.summary.first_token.model_copy(update=facts)
    run.manifest.model.tokenizer = None
    assert f"first token: {said}" in render_run(run, width=80)
    assert f"<dd>{said.strip()}</dd>" in render_report([run])


def test_a_model_without_a_name_is_called_by_its_class_once() -> None:
    run = make_run()
    run.manifest.model.id = run.manifest.model.class_
    assert render_run(run, width=80).startswith("TinyModel  2 M parameters, ")


def test_a_tokenizer_without_bos_is_named_and_token_ids_alone_have_none() -> None:
    run = make_run()
    run.summary.first_token = run.summary.first_token.model_copy(update={"id": None, "text": None, "is_bos": None})
    run.manifest.model.tokenizer_sha256 = "0"
    assert "first token: differs between sequences; the tokenizer has no BOS\n" in render_run(run, width=80)
    run.manifest.model.tokenizer_sha256 = None
    assert "first token: differs between sequences\n" in render_run(run, width=80)


def test_the_first_token_of_each_dataset_is_named_where_they_differ() -> None:
    run = scanned()
    data, first = run.manifest.data[0], run.summary.first_token
    own, none = (first.model_copy(update={"id": number, "text": "<s>"}) for number in (1, None))
    run.summary.first_token = none
    run.manifest.data = [
        data.model_copy(update={"domain": name, "first_token": token}) for name, token in (("a", own), ("b", none))
    ]
    assert first_token(run).endswith(" in a; differs between sequences in b")
    run.manifest.data = [data.model_copy(update={"domain": name, "first_token": own}) for name in "abcde"]
    assert first_token(run) == "differs between sequences"


@pytest.mark.parametrize("heads", [1, 8, 24, 32, 64, 200])
@pytest.mark.parametrize("width", [60, 80, 200])
def test_every_head_is_shown_and_no_line_is_too_long(heads: int, width: int) -> None:
    text = render_run(make_run(heads), width=width)
    assert max(map(len, text.splitlines())) <= width
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("BOS mass"))
    end = next(i for i, line in enumerate(lines) if line.startswith(("strongest", "most BOS")))
    body = [line.replace("sliding:16", "")[6:] for line in lines[start + 1 : end]]
    if "percent" in lines[start]:
        shown = sum(len(line.split()) for line in body[1:])
    else:
        shown = sum(len(line.strip()) for line in body)
    assert shown == 2 * heads


def test_colour_adds_codes_and_changes_no_text() -> None:
    import re

    plain, colored = render_run(make_run(), width=80), render_run(make_run(), width=80, color="truecolor")
    assert "\x1b[" in colored
    assert "\x1b" not in plain
    assert [line.rstrip() for line in re.sub(r"\x1b\[[0-9;]*m", "", colored).splitlines()] == plain.splitlines()


def test_tokens_and_names_are_data() -> None:
    """Escape codes and markup in a token or a model's name are shown, not obeyed."""
    run = make_run(token="\x1b[31mred\u202e[bold]x[/bold]")
    run.manifest.model.id = "evil\x1b]0;title\x07\nname"
    text = render_run(run, width=80, color="truecolor")
    assert "\x1b[31m" not in text
    assert "\x1b]0" not in text
    assert "\\x1b[31mred\\u202e[bold]x[/bold]" in text
    assert "evil\\x1b]0;title\\x07\\nname" in text


def test_no_text_of_a_run_folder_reaches_the_terminal_as_it_is() -> None:
    """Not a name alone: the facts, the streams and the metrics of a forged folder are shown, not obeyed."""
    evil, run = "\x1b[31mX\n::error::y", make_run()
    for facts, names in (
        (run.manifest.model, ("class_", "dtype", "device")),
        (run.summary.streams["text"].dormant, ("rule",)),
    ):
        for name in names:
            setattr(facts, name, evil)
    run.heads["kind"] = run.heads["pattern"] = evil
    run.heads.loc[run.heads["layer"] == 0, "stream"] = evil
    run.summary.streams = {evil: run.summary.streams["text"], "text": run.summary.streams["text"]}
    other = scanned()
    other.manifest.model.dtype = other.manifest.model.device = evil
    other.sequences["stream"] = np.where(other.sequences["layer"] == 0, evil, "text")
    other.sequences = other.sequences.rename(columns={"entropy": evil})
    moved = copy.deepcopy(other)
    moved.sequences[[evil, "bos_mass"]] += 0.1
    for text in render_run(run), render_comparison(compare(other, moved, metrics=["bos_mass", evil])):
        assert "\x1b" not in text
        assert "\n::error::y" not in text
        assert "\\x1b[31mX" in text


def test_heads_without_a_sink_are_not_called_sinks() -> None:
    run = make_run()
    run.heads["sink_score"] = 0.02
    assert "most BOS mass, no sink (" in render_run(run, width=80)
    run.heads["sink_score"] = 0.9
    assert "strongest sinks" in render_run(run, width=80)


def test_no_head_is_called_a_sink_where_nothing_can_be_said_about_sinks() -> None:
    """At few tokens uniform attention exceeds the threshold too, so that neither the heads above it nor their errors
    say anything."""
    run = scanned()
    run.heads["sink_score"], run.heads["sink_score_sem"] = 0.31, 0.1
    assert "strongest sinks" in render_run(run)
    assert "would halve the errors" in render_run(run)
    stream = run.summary.streams["text"]
    stream.sink_heads = 12
    assert repr(run).endswith("12 of 12 heads with a sink>")
    stream.uniform_alpha_0.T = 0.31
    screen = render_run(run)
    assert "most first-token attention (mean" in screen
    assert "would halve the errors" not in screen
    assert render_models([run]).splitlines()[-1].split()[-5:-3] == ["12", "-"], "heads, and not how many have a sink"
    assert repr(run).endswith("12 heads, whose sinks no threshold tells>")


def test_the_rate_of_uniform_attention_is_shown_where_short_sequences_have_one() -> None:
    """A rate of a half says nothing where uniform attention has the same in the shorter half of the sequences."""
    run = scanned()
    stream = run.summary.streams["text"]
    assert {rate.T for rate in stream.uniform_rate_percent.values()} == {0.0}
    assert "uniform  " not in render_run(run, width=80)
    stream.uniform_rate_percent["0.3"].T = 50.0
    row = next(line for line in render_run(run, width=80).splitlines() if line.strip().startswith("uniform  "))
    assert row.split() == ["uniform", *("50.0" if name == "0.3" else "0.0" for name in stream.sink_rate_percent)]


def test_missing_values_are_dashes() -> None:
    run = make_run()
    run.heads.loc[0, "bos_mass"] = np.nan
    assert "    0   - 17 33" in render_run(run, width=80)
    narrow = make_run(40)
    narrow.heads.loc[0, "bos_mass"] = np.nan
    assert "    0 -.......1111" in render_run(narrow, width=80), "a character a head"


def test_domains_have_a_map_each() -> None:
    text = render_run(make_run(domains=("prose", "code")), width=80)
    assert "BOS mass on prose" in text
    assert "BOS mass on code" in text


def test_a_name_of_the_screen_leads_to_its_column() -> None:
    """The screen says `sinkscope metrics NAME`, and calls sink_score alpha_0, sink_margin margin."""
    assert metric_list(["alpha_k"]) == metric_list(["alpha"])
    for name, column in (("alpha_0", "sink_score"), ("margin", "sink_margin")):
        assert metric_list([name]) == metric_list([column])
        with pytest.raises(SinkscopeError, match=rf"did you mean {column}\?"):
            chosen_metrics([scanned()], [name])
        with pytest.raises(SinkscopeError, match=rf"did you mean {column}\?"):
            paper_table([scanned()], None, [name])
        with pytest.raises(SinkscopeError, match=rf"did you mean {column}\?"):
            check_rule(f"{name}>0.5", set(scanned().heads))
        with pytest.raises(SinkscopeError, match=rf"did you mean {column}\?"):
            scanned().show(name)


def test_metric_list_tells_every_column() -> None:
    columns: list[dict[str, Any]] = metric_list([])
    text = render_metrics(columns)
    for column in columns:
        assert column["formula"].endswith("."), "a sentence"
        assert "NaN" not in column["formula"], "tables have empty cells"
        assert column["source"]
        assert column["unit"]
        assert column["range"]
        assert f"  {column['name']}" in text
    assert "alpha_0: 1/T sum_i A[i,0]" in render_metrics(metric_list(["sink_score"]))
    assert {"bos_mass", "honor", "dormant", "cos_first_residual", "max_abs_dim"} <= {c["name"] for c in columns}


def test_examples_name_licence_and_package() -> None:
    text = render_examples(EXAMPLES.values())
    assert "example:gemma-3-270m" in text
    assert "Gemma Terms of Use" in text
    assert "example:minilm" in text
    assert max(map(len, text.splitlines())) <= 80


def test_printable() -> None:
    assert printable("a▁é\t\x00") == "a▁é\\t\\x00"


# Narrow terminals


@pytest.mark.parametrize("width", [44, 60, 72, 80])
def test_no_number_is_cut_or_broken(width: int) -> None:
    """Words fold; where that does not do, the last columns are left out and named."""
    text = render_run(make_run(), width=width)
    assert "…" not in text
    assert max(map(len, text.splitlines()[4:])) <= width
    rows = re.findall(r"^1\.2 .*$", text, re.M)
    assert rows[0].startswith("1.2         0.833 ± 0.010"), "mean and error stand on one line"
    assert ("in a wider terminal also" in text) == (width < 72)
    if width == 60:
        assert "(in a wider terminal also pattern)" in text


def test_a_long_name_of_a_domain_is_folded() -> None:
    made = table("t", ["", "uniform", "layer.token.channel"], [("file:" + "x" * 60, "0.024", "3.0.17")], left=[""])
    lines = as_text([made], 60, None).splitlines()
    assert "layer.token.channel" in lines[1]
    assert sum(line.count("x") for line in lines) == 60
    assert any(line.endswith("0.024               3.0.17") for line in lines)


def test_the_letters_of_a_formula_are_explained() -> None:
    text = render_metrics(metric_list(["honor"]))
    assert "w_i: what the output projection reads of the head" in text
    assert "s_ij" not in text
    assert "H: number of query heads of the layer" in text, "the range has it"
    assert "D: width of the residual stream" in render_metrics(metric_list(["max_abs_dim"]))
    every = render_metrics(metric_list([])).partition("\nSymbols\n")[2]
    assert [symbol for symbol in SYMBOLS if f"\n  {symbol}: " not in every] == []


def test_a_model_of_a_task_has_no_tokenizer() -> None:
    run = make_run()
    run.summary.task = {"name": "trigger", "attention": "softmax", "trigger_position": "3", "in_words": [],
                        "columns": {}, "heads": []}  # fmt: skip
    assert "the task's BOS" in render_run(run, width=80)


def test_a_study_keeps_to_the_terminal() -> None:
    columns = ["attention", "layers", "heads", "seed", "steps", "solved", "evaluation_error", "sinks"]
    columns += ["published_sinks", *(f"{a}bos_mean_{b}" for a in ("", "published_") for b in ("min", "max"))]
    text = render_study(pd.DataFrame(columns=columns), pd.DataFrame(), "word " * 40, Path("folder/" * 8), width=70)
    assert max(map(len, text.splitlines())) <= 80, "only the table is wider"


def test_errors_that_leave_sinks_open_are_named_with_the_sample_that_halves_them() -> None:
    run = scanned()
    run.heads["sink_score"], run.heads["sink_score_sem"] = 0.31, 0.001
    assert "would halve the errors" not in render_run(run)
    run.heads.loc[:1, "sink_score_sem"] = 0.0043  # x t(0.975, 7) = 2.365: the interval begins at 0.2998
    screen = " ".join(render_run(run).split())
    assert (
        "In 2 of 12 heads the 95 % interval of alpha_0 contains 0.3, so it is open whether they have a sink. "
        "32 sequences, 4 times as many, would halve the errors." in screen
    )
    run.heads.loc[:1, "sink_score_sem"] = 0.0042
    assert "would halve the errors" not in render_run(run)
    run.heads["sink_score_sem"] = np.nan
    assert "would halve the errors" not in render_run(run)
