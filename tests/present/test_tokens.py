"""The tokens that are sinks: on the screen, and as a list for other tools."""

from __future__ import annotations

import html
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from desk import scanned
from small_run import make_run
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.present.card import markdown_block
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.run import render_run
from sinkscope.present.text import answers, span
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.schema.manifest import FirstToken
from sinkscope.runs.schema.stream import SinksBeyondFirst, SinkToken
from sinkscope.runs.selections import selected_tokens
from sinkscope.runs.words import beyond_words
from sinkscope.tables.sinks import COLUMNS

EVIL = "\x1b[31mred\n[bold]"


def with_tokens(*rows: dict[str, Any]) -> Run:
    """The screen's run with these rows of tokens.csv; what a row leaves out is that of a '.' in two heads."""
    run = make_run()
    plain = {
        "stream": "text", "kind": "attention", "token": ".", "id": 7, "region": "text", "first": False,
        "occurrences": 40, "sinks": 10, "rate": 0.25, "heads": 2, "sequences": 4, "first_layer": 0, "last_layer": 1,
        "lifetime": 1.5, "mean_alpha": 0.4, "sink_share": 0.125,
    }  # fmt: skip
    run.tokens = pd.DataFrame([plain | row for row in rows], columns=list(COLUMNS)).astype(COLUMNS)
    return run


TABLE = """
tokens that are sinks: alpha_k > 0.3 in some head
token  region   place  sinks  of   rate  heads  layers  alpha_k  share
<s>    special  first      4   4  1.000      6     0-1    0.600  0.875
.      text     later     10  40  0.250      2     0-1    0.400  0.125
sinks: occurrences that are sinks; of: all occurrences; heads: in which any is a
sink; share: part of the attention on all sinks

dormant"""

BOS = {
    "token": "<s>", "id": 1, "region": "special", "first": True, "occurrences": 4, "sinks": 4, "rate": 1.0, "heads": 6,
    "mean_alpha": 0.6, "sink_share": 0.875,
}  # fmt: skip


def test_the_screen_names_the_tokens() -> None:
    text = render_run(with_tokens(BOS, {}, {"kind": "state", "token": "never shown"}), width=80)
    assert TABLE in text
    assert "never shown" not in text


def test_tokens_from_outside_are_shown_not_obeyed_and_no_line_is_too_long() -> None:
    rows = [{"token": EVIL * 9}, {"token": None, "id": None, "region": "patch"}, *[{}] * 9]
    text = render_run(with_tokens(*rows), width=80, color="truecolor")
    assert "\x1b[31m" not in text
    assert "\\x1b[31mr" in text
    assert "and 5 more tokens (tokens.csv)" in text
    assert max(map(len, render_run(with_tokens(*rows), width=80).splitlines())) <= 80


def test_the_report_shows_tokens_as_text_and_their_spelling_on_hover() -> None:
    run = scanned()
    run.tokens = with_tokens({"token": "\u0120the"}, {"token": "\u2581and"}, {"token": "\u010a"}).tokens
    page = render_report([run])
    for raw, text in (("\u0120the", "\u2018 the\u2019"), ("\u2581and", "\u2018 and\u2019"), ("\u010a", "\\n")):
        assert f'<th scope="row" title="{raw}">{text}</th>' in page


def test_the_sentences_of_the_report_show_tokens_as_text() -> None:
    run = scanned()
    stream = run.summary.streams["text"]
    facts = {"kind": "attention", "id": 5, "region": "text", "sinks": 2, "occurrences": 4, "heads": 3}
    named = [SinkToken.model_validate(facts | {"token": token}) for token in ("\u0120the", "\u2581<b>", "\u010a")]
    beyond = SinksBeyondFirst(tokens=named, others=0, created=1, gone=None)
    stream.sinks_beyond_first = beyond
    stream.in_words.append(beyond_words(beyond, 0.3))
    page = html.unescape(render_report([run]))
    assert "' the' (2 of 4 occurrences, in 3 heads), ' <b>' (2 of 4, in 3 heads), '\\n' (2 of 4, in 3 heads)" in page
    assert "\u0120the (" not in page
    assert "<b>" not in render_report([run])
    for shown in (render_run(run), markdown_block(run), repr(answers(run))):
        assert "' the' (2 of" in " ".join(shown.split())
        assert "\u0120" not in shown
    run.tokens = with_tokens({"token": "\u0120the"}).tokens
    assert "\n\u2018 the\u2019" in render_run(run)
    run.summary.first_token = FirstToken(id=5, text="\u2581the", distinct=1, is_bos=False)
    assert "first token: ' the' (id 5)" in render_run(run)


def test_a_token_of_two_regions_is_named_with_them() -> None:
    facts = {"kind": "attention", "id": 5, "sinks": 2, "occurrences": 4, "heads": 3}
    places = [("text", ","), ("generated", ","), ("text", "and")]
    named = [SinkToken.model_validate(facts | {"region": region, "token": token}) for region, token in places]
    words = beyond_words(SinksBeyondFirst(tokens=named, others=0, created=1, gone=None), 0.3)
    assert "',' in text (2 of 4 occurrences, in 3 heads), ',' in generated (2 of 4, in 3 heads), 'and' (2 of" in words


def test_the_list_for_other_tools() -> None:
    state = {"kind": "state", "token": EVIL, "id": 9, "heads": None}
    run = with_tokens(BOS, {}, {"first": True}, state, {"token": None, "id": None, "region": "patch"})
    assert selected_tokens(run, "sink")["text"]["ids"] == [], "10 of 40 occurrences are fewer than half"
    assert selected_tokens(run, "sink")["text"]["ids_below_min_rate"] == [7]
    found = selected_tokens(run, "sink", min_rate=0.25)["text"]
    assert found["ids"] == [7]
    assert found["ids_below_min_rate"] == []
    assert found["ids_at_position_0_only"] == [1], "7 is a sink beyond position 0 too"
    assert [row["region"] for row in found["tokens"]] == ["special", "text", "text", "patch"]
    assert json.loads(json.dumps(found)) == found
    assert selected_tokens(run, "state")["text"]["tokens"][0]["heads"] is None
    empty = selected_tokens(run, "massive")["text"]
    assert [empty[name] for name in ("ids", "ids_below_min_rate", "ids_at_position_0_only", "tokens")] == [[]] * 4
    with pytest.raises(SinkscopeError, match=r"--tokens 'bos': choose one of sink, state, massive"):
        selected_tokens(run, "bos")


def test_a_rate_is_that_of_all_regions_together() -> None:
    quoted = {"region": "quoted", "occurrences": 10, "sinks": 10, "rate": 1.0}
    run = with_tokens({}, quoted)
    for least, expected in ((0.4, [7]), (0.41, [])):
        assert selected_tokens(run, "sink", least)["text"]["ids"] == expected, "20 of 50"
    with pytest.raises(SinkscopeError, match=r"--min-rate 1.5: a share of occurrences from 0 to 1 is needed"):
        selected_tokens(run, "sink", 1.5)


def test_a_rate_over_datasets_needs_the_occurrences_of_each(tmp_path: Path) -> None:
    """Token 9 is a sink in 38 of 40 places of one dataset and in none of the other's, whose places no row counts."""
    run, first, second = make_run(domains=("prose", "code")), "prose", "code"
    run.manifest.data.append(run.manifest.data[0].model_copy(update={"domain": second}))
    run.tokens = with_tokens({}, {"id": 9, "sinks": 38}, {}).tokens.assign(domain=[first, first, second])
    with pytest.raises(SinkscopeError, match=f"the rate of token 9 over its 2 datasets: it is no sink in {second}"):
        selected_tokens(run, "sink")
    assert selected_tokens(run, "sink", 0)["text"]["ids"] == [7, 9]
    assert selected_tokens(run, "sink", 0.96)["text"]["ids_below_min_rate"] == [7, 9], "no dataset can raise a rate"
    assert selected_tokens(run, "sink", domain=first)["text"]["ids"] == [9]
    assert selected_tokens(run, "sink", 0.25, second)["text"]["ids"] == [7]
    with pytest.raises(SinkscopeError, match="--domain 'x': the run has"):
        selected_tokens(run, "sink", domain="x")
    refused = CliRunner().invoke(app, ["export", str(tmp_path), "--domain", "x"])
    assert (refused.exit_code, refused.stderr) == (2, "sinkscope: error: --domain belongs to --tokens\n")


def test_ids_for_quantisers_are_sinks_wherever_they_stand(tmp_path: Path) -> None:
    run = scanned()
    often = {"token": "\n", "id": 9, "sinks": 38}
    run.tokens = with_tokens(BOS, {}, often, {"first": True, "token": "Look", "id": 8}).tokens
    run.save(tmp_path / "run")
    words = ["export", str(tmp_path / "run"), "--tokens", "sink", "--format", "ids"]
    done = CliRunner().invoke(app, words)
    assert done.stdout == "9\n"
    assert "left out: 2 tokens that were sinks at position 0 only" in done.stderr
    assert "1 token that was a sink in fewer than 0.5 of its occurrences; --min-rate 0 lists" in done.stderr
    assert CliRunner().invoke(app, [*words, "--min-rate", "0"]).stdout == "7\n9\n"
    refused = CliRunner().invoke(app, ["export", str(tmp_path / "run"), "--min-rate", "0"])
    assert (refused.exit_code, refused.stderr) == (2, "sinkscope: error: --min-rate belongs to --tokens\n")


@pytest.mark.parametrize(
    ("selection", "kind", "one", "several"),
    [
        ("massive", "massive", "1 token that held a massive activation", "2 tokens that held massive activations"),
        ("state", "state", "1 token that had a state like the first token's", "2 tokens that had states like the"),
    ],
)
def test_ids_of_other_kinds_are_not_called_sinks(
    selection: str, kind: str, one: str, several: str, tmp_path: Path
) -> None:
    run = scanned()
    rows = [{"first": True, "id": 8}, {}, {"id": 9, "sinks": 1}]
    run.tokens = with_tokens(*({"kind": kind} | row for row in rows)).tokens
    run.save(tmp_path / "run")
    words = ["export", str(tmp_path / "run"), "--tokens", selection, "--format", "ids"]
    told = CliRunner().invoke(app, words).stderr
    assert f"left out: {one} at position 0 only" in told
    assert f"left out: {several}" in told
    assert "were sinks" not in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--tokens", "sink"), "holds no tokens.csv: an older sinkscope wrote it; scan it again"),
        (("--tokens", "sink", "--heads", "sink"), "--heads and --tokens write a list each: give one of them"),
        (("--tokens", "sink", "--level", "head"), "--tokens writes a list, not a table"),
    ],
)
def test_what_cannot_be_listed_is_refused(words: tuple[str, ...], said: str) -> None:
    run = Path(__file__).parents[1] / "fixtures" / "v0_1" / "smoothing"
    result = CliRunner().invoke(app, ["export", str(run), *words])
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_saved_table_keeps_tokens_that_look_like_something_else(tmp_path: Path) -> None:
    tokens = ["null", "NA", "nan", "1", "1.50", "True", '"', ",", "\n", "\r", "a\r\nb", " ", "#"]
    run = scanned()
    made = with_tokens({"token": None, "id": None}, *({"token": token} for token in tokens))
    run.tokens = made.tokens
    run.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run").tokens
    assert loaded is not None
    assert loaded["token"].isna().tolist() == [True] + [False] * len(tokens)
    assert loaded["token"][1:].tolist() == tokens
    pd.testing.assert_frame_equal(loaded, made.tokens)


def test_a_single_layer_is_named_once() -> None:
    assert [span(5, 5, "-"), span(0, 17, " to ")] == ["5", "0 to 17"]
