"""`sinkscope claims` of a model of another shape, whose tokenizer has no BOS: every claim has a verdict or a reason."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import make_tokenizer
from tokenizers import processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from sinkscope.claims.claim import NOT_TESTED, chosen_claims
from sinkscope.claims.findings import number_of, read_csv
from sinkscope.cli import app

LAYERS, HEADS = 2, 6


@pytest.fixture(scope="module")
def no_bos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2: positions in the embedding, LayerNorm, one fused projection, a head of its own for every key."""
    folder = tmp_path_factory.mktemp("gpt2")
    backend = make_tokenizer().backend_tokenizer
    backend.post_processor = processors.ByteLevel()  # it puts nothing first
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    assert tokenizer.bos_token is None
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=256, n_embd=48, n_layer=LAYERS, n_head=HEADS, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_every_claim_is_put_to_a_model_without_bos(
    no_bos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    words = ["--num-sequences", "2", "--seq-len", "64", "--quiet", "--out", str(out)]
    monkeypatch.setattr("sinkscope.claims.page.draw_figures", lambda *_: ({}, {}, []))  # half of the time
    done = CliRunner().invoke(app, ["claims", str(no_bos), *words])
    assert done.exit_code == 0, done.output
    table = read_csv(out / "claims.csv")
    verdicts = table[table["row"] == "verdict"].set_index("claim")
    claims = chosen_claims()
    assert list(verdicts.index) == [each.name for each in claims]

    for each in claims:
        verdict, reason = verdicts.loc[each.name, "shown"], verdicts.loc[each.name, "quantity"]
        deciding = table[(table["claim"] == each.name) & (table["row"] == "deciding")]
        if verdict == NOT_TESTED:
            assert deciding.empty
            assert reason.strip(), each.name
            assert "\n" not in reason
        else:
            (row,) = deciding.itertuples()
            assert each.rule.verdict(number_of(row).value) == verdict

    told = verdicts["quantity"]
    assert told["stays-at-the-first-position"] == (
        "--first bos: the tokenizer has no BOS token; give none, random or a token"
    )
    assert told[told.str.contains("BOS", na=False)].index.tolist() == ["stays-at-the-first-position"]
    assert told["value-is-not-needed"] == told["key-bias"] == "no head has a sink"
    first = table[table["quantity"].str.fullmatch("the first token of (random|repeated) tokens is BOS", na=False)]
    assert first["shown"].tolist() == ["-", "-"]
    smoothed = table[(table["claim"] == "dense-smooths-more") & (table["row"] != "verdict")]
    assert smoothed["shown"].str.extract(r"\d+ of (\d+)").astype(float).max().item() <= LAYERS * HEADS
