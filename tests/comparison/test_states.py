"""What a comparison says of massive activations and of the tokens that are sinks."""

from __future__ import annotations

import json
from typing import Any

import pandas as pd
import pytest
from desk import scanned
from tiers import slow_but

from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.levels import massive_rows, sink_token_rows
from sinkscope.present.differences import states
from sinkscope.present.html.report import render_report
from sinkscope.present.terminal.comparison import render_comparison
from sinkscope.runs.run import Run
from sinkscope.runs.schema.base import to_json

BOS = {"token": "<s>", "id": 1, "region": "special", "first": True, "sinks": 4, "occurrences": 4}

PAIRS: list[Any] = [("prose", "prose", None)]


def run_with(*rows: dict[str, Any], **massive: Any) -> Run:
    """A run whose tokens.csv has these rows, and whose summary says this of massive activations."""
    run = scanned()
    plain = {"stream": "text", "kind": "attention", "token": ".", "id": 7, "region": "text", "first": False,
             "sinks": 10, "occurrences": 40, "rate": 0.25, "heads": 2, "first_layer": 0, "last_layer": 1,
             "mean_alpha": 0.4, "sink_share": 0.1}  # fmt: skip
    run.tokens = pd.DataFrame([plain | row for row in rows], columns=list(plain))
    stream = run.summary.streams["text"]
    stream.massive_activations = stream.massive_activations.model_copy(update=massive)
    return run


def test_tokens_are_matched_by_text_and_summed_over_regions() -> None:
    quoted = {"region": "quoted", "sinks": 1, "occurrences": 2}
    a = run_with(BOS, {}, quoted, {"kind": "massive", "token": "x"})
    b = run_with(BOS, {"id": 99, "sinks": 3, "occurrences": 42}, {"token": None, "id": 5})
    rows = sink_token_rows(a, b, PAIRS).set_index(["token", "first"])
    assert rows.loc[("<s>", True), ["sinks_a", "occurrences_a", "sinks_b"]].tolist() == [4, 4, 4]
    assert rows.loc[(".", False), ["sinks_a", "occurrences_a", "sinks_b", "occurrences_b"]].tolist() == [11, 42, 3, 42]
    assert rows.loc[("id 5", False), ["sinks_a", "sinks_b"]].tolist() == [0, 10]
    assert pd.isna(rows.loc[("id 5", False), "occurrences_a"])
    assert len(rows) == 3
    (said,) = [line for line in states(compare(a, b)) if line.startswith("tokens")]
    assert said == (
        "tokens that are attention sinks: in both '<s>' at position 0 (4 of 4 occurrences), '.' (11 of 42 in A, 3 of "
        "42 in B); only in B 'id 5' (10 of 40 occurrences)"
    )


def test_only_domains_that_are_compared_are_counted() -> None:
    a, b = run_with({}, {}), run_with({}, {})
    for run, names in ((a, ["prose", "code"]), (b, ["prose", "chat"])):
        assert run.tokens is not None
        run.tokens.insert(0, "domain", names)
    (row,) = sink_token_rows(a, b, PAIRS).to_dict("records")
    assert (row["occurrences_a"], row["occurrences_b"]) == (40, 40)
    (row,) = sink_token_rows(a, b, [*PAIRS, ("code", "chat", None)]).to_dict("records")
    assert (row["occurrences_a"], row["occurrences_b"]) == (80, 80)


def test_massive_activations_stand_side_by_side() -> None:
    a = run_with(present=True, max_abs=5000.0, layer=1)
    b = run_with(present=False, max_abs=70.5, layer=0)
    last = a.sequences["head"].isna() & (a.sequences["layer"] == a.sequences["layer"].max())
    a.sequences["massive_tokens"] = a.sequences["massive_tokens"].mask(last, 2.5)
    (row,) = massive_rows(a, b).to_dict("records")
    assert (row["max_abs_a"], row["layer_a"], row["massive_tokens_a"], row["present_b"]) == (5000, 1, 2.5, False)
    (said,) = [line for line in states(compare(a, b)) if line.startswith("massive")]
    assert said == (
        "massive activations: A up to 5000 (in the input of layer 1), on average 2.5 tokens of a sequence in the layer "
        "with most; B none, the largest |x| is 70.5"
    )
    (none,) = [line for line in states(compare(b, b)) if line.startswith("massive")]
    assert none == "massive activations: none in A or B; the largest |x| is 70.5 and 70.5"
    for run in (a, b):  # streams keep A's order, so that the same runs give the same bytes
        text = run.summary.streams["text"]
        run.summary.streams = dict.fromkeys(("vision", "text", "decoder", "audio"), text)
    assert massive_rows(a, b)["stream"].tolist() == ["vision", "text", "decoder", "audio"]
    unseen = run_with(present=None, max_abs=None, layer=None)
    assert massive_rows(a, unseen).empty


def test_massive_tokens_are_counted_over_all_datasets() -> None:
    """One dataset has two such tokens in each of 4 sequences, the other none in 12: half a token a sequence. The mean
    of the first dataset alone was shown."""
    a = run_with(present=True, max_abs=5000.0, layer=1)
    own = a.sequences[a.sequences["sequence"] < 4]
    last = own["head"].isna() & (own["layer"] == 2)
    first = own.assign(massive_tokens=own["massive_tokens"].mask(last, 2.0))
    others = [own.assign(domain="other", sequence=own["sequence"] + 4 * copy) for copy in range(3)]
    a.sequences = pd.concat([first, *others], ignore_index=True)
    a.layers = pd.concat([a.layers.assign(domain=name, massive_tokens=2.0) for name in ("prose", "other")])
    (row,) = massive_rows(a, run_with()).to_dict("records")
    assert row["massive_tokens_a"] == 0.5
    a.sequences = a.sequences.drop(columns="massive_tokens")
    (row,) = massive_rows(a, run_with()).to_dict("records")
    assert pd.isna(row["massive_tokens_a"])


def test_screen_page_and_json_say_it_and_tokens_are_escaped() -> None:
    a, b = run_with(BOS, present=True, max_abs=5000.0, layer=1), run_with({"token": "\x1b[31m<i>"})
    result = compare(a, b)
    screen = render_comparison(result, width=300)
    assert all(line in screen for line in states(result))
    assert "\x1b" not in screen
    page = render_report([a, b], result)
    assert "<i>" not in page
    assert "assive activations: A up to 5000" in page
    found = json.loads(to_json(result.as_dict()))
    assert found["massive"][0]["max_abs_a"] == 5000
    assert [row["occurrences_b"] for row in found["tokens"]] == [None, 40]


def test_a_run_of_an_older_sinkscope_has_no_tokens() -> None:
    a, b = run_with(BOS), run_with(BOS)
    b.tokens = None
    assert sink_token_rows(a, b, PAIRS).empty
    assert "tokens" not in compare(a, b).as_dict()


@pytest.mark.parametrize("count", slow_but([3, 5], 5))
def test_a_sentence_names_three_tokens(count: int) -> None:
    a = run_with(*({"token": letter, "sinks": 9 - place} for place, letter in enumerate("abcde"[:count])))
    (said,) = [line for line in states(compare(a, run_with())) if line.startswith("tokens")]
    assert said.startswith("tokens that are attention sinks: only in A 'a' (9 of 40 occurrences), 'b' (8 of 40 ")
    assert said.endswith(" and 2 more") == (count == 5)
