"""Configurations of a few bytes that ask for more than any machine has: refused in one line, before it is taken."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Refused
from ggufs import write_gguf
from pictured import with_image_processors

from sinkscope import SinkscopeError
from sinkscope.checkpoints import open_checkpoint
from sinkscope.inputs.images import processed

SECONDS, BYTES = 100, 8 * 2**30

BOMBS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**12},
    "a hundred thousand layers": {"num_hidden_layers": 99_999},
    "labels": {"num_labels": 10**9},
    "hidden size": {"hidden_size": 2**20, "head_dim": 2**18},
    "vocabulary": {"vocab_size": 2**40},
    "inner size": {"intermediate_size": 10**9},
    "no sizes": {"model_type": "gemma3", "hidden_size": None},
    "no sizes of text": {"model_type": "gemma3_text", "hidden_size": None, "num_hidden_layers": None},
    "experts": {"model_type": "mixtral", "num_local_experts": 10**5},
    "positions of GPT-2": {"model_type": "gpt2", "n_positions": 200_000, "n_embd": 64, "n_head": 4},
    "a list of layers": {"model_type": "swin", "depths": [10**12, 2]},
    "nested": {"text_config": {"num_hidden_layers": 10**12}},
}

LOADER = """
import resource, sys, time
from sinkscope import SinkscopeError
from sinkscope.checkpoints import open_checkpoint
import torch, transformers.models.llama.modeling_llama
resource.setrlimit(resource.RLIMIT_AS, ({bytes}, {bytes}))
for folder in sys.argv[1:]:
    began = time.monotonic()
    try:
        open_checkpoint(folder)
        told = "loaded"
    except SinkscopeError as error:
        told = str(error)
    print(f"{{time.monotonic() - began:.1f}}\\t{{told}}", flush=True)
"""


@pytest.fixture(scope="module")
def told(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one child, of little memory, says to each bomb."""
    folders = []
    for number, changes in enumerate(BOMBS.values()):
        folder = shutil.copytree(tiny_folder, tmp_path_factory.mktemp("bomb") / str(number))
        config = json.loads((folder / "config.json").read_text()) | changes
        kept = {name: value for name, value in config.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(kept))
        folders.append(str(folder))
    done = subprocess.run(
        [sys.executable, "-c", LOADER.format(bytes=BYTES), *folders],
        capture_output=True, text=True, timeout=SECONDS, check=True,
    )  # fmt: skip
    return dict(zip(BOMBS, done.stdout.splitlines(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_in_a_configuration_is_refused(bomb: str, told: dict[str, str]) -> None:
    seconds, line = told[bomb].split("\t")
    assert "loaded" not in line
    assert "unexpected" not in line
    assert float(seconds) < SECONDS / 4


def test_a_bomb_in_the_metadata_of_a_gguf_is_refused(tmp_path: Path, refused: Refused) -> None:
    said = refused(write_gguf(tmp_path / "model.gguf", layers=10**6))
    assert "its metadata say 1000000 blocks, and it holds 1 tensors" in said


@pytest.mark.parametrize("depth", [150, 100_000])
def test_a_configuration_nested_too_deeply(depth: int, copied: Path, refused: Refused) -> None:
    text = (copied / "config.json").read_text().rstrip().removesuffix("}")
    (copied / "config.json").write_text(text + ', "more": ' + "[" * depth + "]" * depth + "}")
    assert "config.json is damaged: its values are nested too deeply" in refused(copied)


def test_a_model_of_the_size_of_its_weights_is_loaded(tiny_folder: Path) -> None:
    """The bounds count nothing once the model is loaded."""
    open_checkpoint(str(tiny_folder))
    with torch.device("meta"):
        torch.nn.Linear(2**20, 2**20)


@with_image_processors
def test_pictures_are_not_enlarged_without_end(tmp_path: Path) -> None:
    from PIL import Image
    from transformers import ViTImageProcessor

    pictures = tmp_path / "pictures"
    pictures.mkdir()
    Image.new("RGB", (8, 8)).save(pictures / "a.png")
    ViTImageProcessor(size={"height": 50_000, "width": 50_000}).save_pretrained(tmp_path)
    with pytest.raises(SinkscopeError, match="size height 50000, and at most 10,000"):
        processed(pictures, None, None, {"pretrained_model_name_or_path": str(tmp_path)}, alone=True)
