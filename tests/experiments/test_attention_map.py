"""One head's full map: against transformers' own map, layers chosen by number, refused input, the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Scan
from models import tiny
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from sinkscope import SinkscopeError
from sinkscope.cli import app
from sinkscope.experiments.attention_map import MOST_TOKENS, attention_map, attention_maps

GPT2 = {"n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
TEXT = "The ferry bell rang twice."


def test_it_is_the_models_own_map(tiny_folder: Path) -> None:
    model = AutoModel.from_pretrained(tiny_folder, attn_implementation="eager").eval()
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        own = model(ids, output_attentions=True).attentions
    for layer, head in ((0, 0), (1, 3)):
        weights, tokens = attention_map(str(tiny_folder), TEXT, [0, 1], layer, head)
        np.testing.assert_allclose(weights, own[layer][0, head].numpy(), atol=1e-6)
        assert weights.shape == (ids.shape[1],) * 2
        np.testing.assert_allclose(weights.sum(1), 1, atol=1e-6)
        assert (np.triu(weights, 1) == 0).all()
        assert tokens == tokenizer.convert_ids_to_tokens(ids[0].tolist())
        assert tokens[0] == "<s>"


def test_layers_without_attention_have_numbers_too(tiny_folder: Path) -> None:
    """A hybrid model whose layers 1 and 3 have attention returns two maps: the second is layer 3's."""
    second, _ = attention_map(str(tiny_folder), TEXT, [0, 1], 1, 0)
    np.testing.assert_array_equal(attention_map(str(tiny_folder), TEXT, [1, 3], 3, 0)[0], second)
    with pytest.raises(SinkscopeError, match="--layer 0: layers with attention are 1, 3"):
        attention_map(str(tiny_folder), TEXT, [1, 3], 0, 0)
    with pytest.raises(SinkscopeError, match="2 attention maps for 3 layers"):
        attention_map(str(tiny_folder), TEXT, [0, 1, 2], 0, 0)


@pytest.mark.parametrize(
    ("text", "layer", "head", "message"),
    [
        (TEXT, 2, 0, "--layer 2: layers with attention are 0 to 1"),
        (TEXT, -1, 0, "--layer -1"),
        (TEXT, 0, 4, "--head 4: layer 0 has heads 0 to 3"),
        (TEXT, 0, -1, "--head -1"),
        ("word " * 300, 0, 0, f"give 1 to {MOST_TOKENS}"),
    ],
)
def test_what_is_not_there_is_refused(tiny_folder: Path, text: str, layer: int, head: int, message: str) -> None:
    with pytest.raises(SinkscopeError, match=message):
        attention_map(str(tiny_folder), text, [0, 1], layer, head)


def test_a_text_that_is_longer_than_the_model_s_positions_is_refused(copied: Path, tokenizer: Any) -> None:
    """GPT-2's table of positions has no row for what lies past them."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **{**GPT2, "vocab_size": len(tokenizer)}))
    for file in copied.glob("*.safetensors"):
        file.unlink()
    model.save_pretrained(copied)
    with pytest.raises(SinkscopeError, match=r"has 8 positions, and --text \d+ tokens: give fewer"):
        attention_map(str(copied), TEXT, [0], 0, 0)
    with pytest.raises(SinkscopeError, match="has 8 positions, and --length 9: give fewer"):
        attention_maps(str(copied), TEXT, [0], [(0, 0)], [9])
    [found] = attention_maps(str(copied), TEXT, [0], [(0, 0)], [8])
    assert found.weights.shape == (8, 8)


def test_each_length_reads_so_many_first_tokens(tiny_folder: Path) -> None:
    whole, tokens = attention_map(str(tiny_folder), TEXT, [0, 1], 1, 2)
    short, all_of_it = attention_maps(str(tiny_folder), TEXT, [0, 1], [(1, 2)], [5, len(tokens)])
    assert short.tokens == tokens[:5]
    np.testing.assert_allclose(short.weights, whole[:5, :5], atol=1e-6)
    np.testing.assert_array_equal(all_of_it.weights, whole)
    for length in (1, len(tokens) + 1):
        said = f"--length {length}: the text has {len(tokens)} tokens; give a length from 2 to that number"
        with pytest.raises(SinkscopeError, match=said):
            attention_maps(str(tiny_folder), TEXT, [0, 1], [(1, 2)], [5, length])


def test_a_model_without_tokenizer_is_refused(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    for model in (str(tmp_path), "example:trigger-relu"):
        with pytest.raises(SinkscopeError, match="has no tokenizer"):
            attention_map(model, TEXT, [0, 1, 2], 0, 0)


@pytest.mark.slow
def test_the_command_draws_it(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    run = scan_cli(tiny_folder).folder
    out = tmp_path / "head.svg"
    arguments = ["plot", str(run), "--figure", "attention", "--layer", "1", "--head", "2", "--text", TEXT]
    result = CliRunner().invoke(app, [*arguments, "-o", str(out)])
    assert result.exit_code == 0, result.output
    assert out.read_bytes().startswith(b"<?xml")
    refused = CliRunner().invoke(app, [*arguments, "--head", "9", "-o", str(out)])
    assert refused.exit_code == 2
    assert refused.stderr == "sinkscope: error: --head 9: layer 1 has heads 0 to 3\n"
