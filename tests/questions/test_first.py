"""Position or token: where the sink goes when BOS is moved or replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import VOCABULARY, Refused, Scan, make_model
from tiers import nightly, slow_but
from transformers import AutoConfig, AutoModelForCausalLM

import sinkscope
from sinkscope.questions.first import QUESTION
from sinkscope.questions.first.tables import bos_place, verdict
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.openings import no_verdict

ASKED: dict[str, Any] = {"first": ["bos", "random"], "prepend": [0, 6], "seq_len": 40, "num_sequences": 3}


def planted(where: str) -> Any:
    """A GPT-2 of one layer whose heads look at position 0 (`position`), at BOS (`token`), at both, or at neither."""
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": VOCABULARY}
    config = AutoConfig.for_model("gpt2", **sizes, bos_token_id=0, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()
    body, width = model.transformer, 32
    mark = torch.randn(width)
    with torch.no_grad():
        if where in ("position", "both"):
            body.wpe.weight[0] += 40 * mark
        if where in ("token", "both"):
            body.wte.weight[0] += 40 * mark
        projection = body.h[0].attn.c_attn
        seen = torch.nn.functional.layer_norm(mark, (width,))
        projection.weight[:, width : 2 * width] = torch.randn(width, width) / width**0.5
        projection.bias[:width] = 2 * (seen @ projection.weight[:, width : 2 * width])  # every query looks for the mark
    return model


@pytest.mark.parametrize("where", slow_but(["position", "token", "both", "none"], "token"))
def test_a_planted_sink_gets_its_verdict(where: str, tokenizer: Any) -> None:
    run = sinkscope.scan(planted(where), tokenizer=tokenizer, data="prose", self_check=False, **ASKED)
    table = run.measured["first"]
    assert table["verdict"].tolist() == [where] * 2
    found = run.summary.streams["text"].measured["first"]
    assert found[where] == 2
    assert found["sinks_on_bos"] == (0 if where == "none" else 2)
    assert run.domains is not None
    assert run.domains["paired"].all()


def test_the_columns_against_the_tables_of_every_domain(tokenizer: Any) -> None:
    """Means over sequences of alpha, as heads.csv and positions.parquet have them by domain."""
    run = sinkscope.scan(make_model(), tokenizer=tokenizer, data=["prose", "code"], self_check=False, **ASKED)
    table, positions = run.measured["first"], run.positions.set_index(["domain", "layer", "head", "position"])["alpha"]
    specs = ("prose", "code")

    def alpha(row: Any, place: int, *endings: str) -> float:
        names = [f"{spec} first={ending}" for spec in specs for ending in endings]
        return float(np.mean([positions[name, row.layer, row.head, place] for name in names]))

    for row in table.itertuples():
        assert row.alpha_0_bos_first == pytest.approx(alpha(row, 0, "bos prepend=0"), rel=1e-6)
        assert row.alpha_bos_later == pytest.approx(alpha(row, 6, "bos prepend=6"), rel=1e-6)
        assert row.alpha_0_bos_later == pytest.approx(alpha(row, 0, "bos prepend=6"), rel=1e-6)
        others = ("random prepend=0", "random prepend=6")
        assert row.alpha_0_other_first == pytest.approx(alpha(row, 0, *others), rel=1e-6)
    scores = run.sequences[run.sequences["head"].notna()].set_index(["domain", "sequence", "layer", "head"])[
        "sink_score"
    ]
    both = [scores.xs(f"{spec} first=random prepend={n}") for spec in specs for n in (0, 6)]
    rows = [(both[2 * at] + both[2 * at + 1]) / 2 for at in (0, 1)]
    pooled = pd.concat([each.unstack(["layer", "head"]) for each in rows])
    expected = pooled.std(ddof=1) / np.sqrt(len(pooled))
    assert table["alpha_0_other_first_sem"].to_numpy() == pytest.approx(expected.to_numpy(), rel=1e-6)
    rate = (pooled > run.summary.epsilon).mean()
    assert table["alpha_0_other_first_rate"].to_numpy() == pytest.approx(rate.to_numpy())


def test_each_sequence_counts_by_where_its_own_bos_stands(tokenizer: Any) -> None:
    """One with BOS first, two without, as where a model wrote BOS into one, and two with BOS at places that differ."""
    ids = torch.randint(3, VOCABULARY, (5, 20), generator=torch.Generator().manual_seed(0))
    ids[0, 0], ids[3, 5], ids[4, 7] = 0, 0, 0
    run = sinkscope.scan(make_model(), data=ids, tokenizer=tokenizer, measure="first", self_check=False)
    table, rows = run.measured["first"], run.sequences[run.sequences["head"].notna()]
    alpha = rows.pivot(index=["layer", "head"], columns="sequence", values="sink_score").to_numpy(float)
    np.testing.assert_allclose(table["alpha_0_bos_first"], alpha[:, 0], rtol=1e-6)
    np.testing.assert_allclose(table["alpha_0_other_first"], alpha[:, 1:3].mean(1), rtol=1e-6)
    assert table[["alpha_bos_later", "alpha_0_bos_later", "verdict"]].isna().all(axis=None)
    left_out = [warning for warning in run.manifest.warnings if warning.startswith("--measure first leaves out")]
    assert left_out == [
        "--measure first leaves out 2 sequences of token ids: BOS stands at a later position in them, but not at one "
        "position in all sequences"
    ]


@pytest.mark.slow
def test_the_command_says_which(tiny_folder: Path, scan_cli: Scan) -> None:
    words = ("--first", "bos", "--first", "none", "--prepend", 0, "--prepend", 4, "--no-self-check")
    outcome = scan_cli(tiny_folder, *words)
    assert outcome.code == 0, outcome.stderr
    assert "\n\nPosition or token: " in outcome.stdout  # after an empty line, as other paragraphs
    assert "not first" not in outcome.stderr
    run = sinkscope.load_run(outcome.folder)
    assert run.manifest.request.first == ("bos", "none")
    assert run.manifest.request.prepend == (0, 4)
    assert run.manifest.request.measures == ("first",)
    assert [facts.bos for facts in run.manifest.data][-1] == "first=none prepend=4"
    assert [*run.measured["first"]] == [column.name for column in table_columns(QUESTION.tables[0])]


def test_token_ids_alone_have_no_bos() -> None:
    run = sinkscope.scan(make_model(), data=torch.ones(2, 20, dtype=torch.long), measure="first", self_check=False)
    found = run.summary.streams["text"].measured["first"]
    assert "not measured, since no BOS is known" in found["in_words"]
    assert found["sinks_on_bos"] is None


@pytest.mark.parametrize(
    ("asked", "said"),
    [({"first": "random", "prepend": ()}, "BOS never stood at a later position"),
     ({"first": "bos", "prepend": [0, 6]}, "every text was read with BOS")],
)  # fmt: skip
def test_what_is_missing_is_said(asked: dict[str, Any], said: str, tokenizer: Any) -> None:
    run = sinkscope.scan(make_model(), tokenizer=tokenizer, data="prose", self_check=False, **{**ASKED, **asked})
    found = run.summary.streams["text"].measured["first"]
    assert said in found["in_words"]
    assert found["missing"] == found["heads"] == 8
    assert run.measured["first"]["verdict"].isna().all()


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--first", "bos", "--bos", "never"), "both say how a sequence begins"),
     (("--first", "many words in a row"), "tokens of it"), (("--first", "none", "--first", "none"), "twice"),
     (("--prepend", -1), "--prepend -1"), (("--prepend", 40), "leaves no room for text"),
     (("--first", "bos", "--images", "nowhere"), "go with --data alone")],
)  # fmt: skip
def test_bad_openings_are_one_line(words: tuple[object, ...], said: str, tiny_folder: Path, refused: Refused) -> None:
    assert said in refused(tiny_folder, *words)


@pytest.mark.parametrize(
    ("words", "said"),
    [((), "BOS never stands at a later position"),
     (("--first", "random"), "BOS never stands at a later position"),
     (("--first", "random", "--first", "none", "--prepend", 8), "BOS never stands at a later position"),
     (("--first", "bos", "--first", "bosx4", "--prepend", 0, "--prepend", 8), "every text is read with BOS")],
)  # fmt: skip
def test_openings_without_a_verdict_are_refused_before_the_model_is_loaded(
    words: tuple[object, ...], said: str, tiny_folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModel

    monkeypatch.setattr(AutoModel, "from_pretrained", lambda *_, **__: pytest.fail("the model was loaded"))
    assert f"--measure first can give no verdict: {said}" in refused(tiny_folder, "--measure", "first", *words)


def test_openings_that_may_give_a_verdict_are_not_refused() -> None:
    for first, prepend in (((), (8,)), (("bos", "random"), (0, 8)), (("bosx4", "none"), ()), (("auto",), (4,))):
        assert no_verdict(first, prepend) is None


def test_a_model_that_reads_its_own_task(refused: Refused) -> None:
    assert "reads real vectors" in refused("example:trigger-softmax", "--first", "bos")


def test_the_verdict_and_where_bos_stands() -> None:
    assert verdict(0.5, 0.1, 0.3) == "token"
    assert verdict(0.1, 0.5, 0.3) == "position"
    assert verdict(0.5, 0.5, 0.3) == "both"
    assert verdict(0.3, 0.3, 0.3) == "none"
    assert verdict(np.nan, 0.5, 0.3) is verdict(0.5, np.nan, 0.3) is None
    assert bos_place(np.array([[7, 0, 0], [8, 0, 9]]), 0) == 1
    assert bos_place(np.array([[7, 5], [8, 9]]), 0) == -1
    assert bos_place(np.array([[0, 5], [8, 0]]), 0) is None
    assert bos_place(np.array([[0, 5]]), None) is None


@pytest.mark.real
@pytest.mark.slow
@nightly
def test_gemma_s_sinks_follow_bos() -> None:
    run = sinkscope.scan("example:gemma-3-270m", self_check=False, **{**ASKED, "seq_len": 64})
    found = run.summary.streams["text"].measured["first"]
    assert found["of_sinks_on_bos"]["token"] > 0.9 * found["sinks_on_bos"]
    assert found["position"] == 0
