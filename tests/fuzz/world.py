"""What the cases damage: small checkpoints, runs, a baseline, a policy, texts, recordings, pictures. Made once."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

SHORT = ("--seq-len", "16", "--num-sequences", "4", "--quiet", "--no-self-check")
POLICY = """\
significance = 0.01
same_precision = 0.5
[[rules]]
metric = "bos_mass"
level = "head"
max_change = 0.1
[[rules]]
metric = "entropy"
level = "summary"
max_relative_change = 0.2
significance = 0.05
"""
TEXT = "The ferry bell rang twice before the fog took the harbour. " * 12


def build(folder: Path) -> None:
    """Writes everything into `folder`."""
    from conftest import make_model, make_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer()
    make_model().save_pretrained(folder / "tiny")
    tokenizer.save_pretrained(folder / "tiny")
    make_model(num_hidden_layers=2).save_pretrained(folder / "split", max_shard_size="200KB")
    tokenizer.save_pretrained(folder / "split")
    _speech(folder / "whisper", tokenizer)
    _vision(folder / "vit")
    _media(folder)
    (folder / "texts").mkdir()
    _texts(folder / "texts")
    write_gguf(folder / "model.gguf")
    (folder / "policy.toml").write_text(POLICY, "utf-8")
    _runs(folder)


def _runs(folder: Path) -> None:
    from sinkscope import scan
    from sinkscope.comparison.baseline import baseline_of, baseline_text

    common: dict[str, Any] = {"seq_len": 16, "num_sequences": 4, "self_check": False}
    tiny = str(folder / "tiny")
    run = scan(tiny, data=["prose", "code"], bos="auto", smoothing=True, **common)
    run.save(folder / "a")
    scan(tiny, data=["prose", "code"], bos="auto", dtype="bfloat16", **common).save(folder / "b")
    scan(tiny, data="random", **common).save(folder / "c")
    (folder / "baseline.json").write_text(baseline_text(baseline_of(run)), "utf-8")


def _speech(folder: Path, tokenizer: Any) -> None:
    import torch
    from families import tiny_config
    from transformers import AutoModel, WhisperFeatureExtractor

    config = tiny_config("whisper")
    config.vocab_size, config.decoder_start_token_id = len(tokenizer), tokenizer.bos_token_id
    torch.manual_seed(0)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _vision(folder: Path) -> None:
    from families import tiny_model
    from transformers import AutoModel, ViTImageProcessor

    tiny_model(AutoModel, "vit").save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


def _media(folder: Path) -> None:
    from PIL import Image

    generator = np.random.default_rng(0)
    (folder / "wav").mkdir()
    (folder / "png").mkdir()
    for name, channels in (("a", 1), ("b", 2)):
        with wave.open(str(folder / "wav" / f"{name}.wav"), "wb") as file:
            file.setnchannels(channels)
            file.setsampwidth(2)
            file.setframerate(16000)
            file.writeframes(generator.integers(-9000, 9000, 4000 * channels).astype("<i2").tobytes())
    for name, mode in (("a", "RGB"), ("b", "L")):
        shape = (40, 50, 3) if mode == "RGB" else (40, 50)
        Image.fromarray(generator.integers(0, 255, shape).astype("uint8"), mode).save(folder / "png" / f"{name}.png")
    with Image.open(folder / "png" / "a.png") as picture:
        picture.save(folder / "png" / "c.jpg")


def _texts(folder: Path) -> None:
    import pandas as pd

    (folder / "x.txt").write_text(TEXT, "utf-8")
    lines = [{"text": TEXT}, {"text": TEXT[::-1]}, {"text": TEXT.upper()}]
    (folder / "x.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", "utf-8")
    ids = [{"input_ids": [0, *range(3, 40)]} for _ in range(4)]
    (folder / "ids.jsonl").write_text("\n".join(map(json.dumps, ids)) + "\n", "utf-8")
    pd.DataFrame(lines).to_parquet(folder / "x.parquet")


def write_gguf(path: Path, draw: Random | None = None) -> None:
    """A GGUF of one tensor; with `draw`, odd sizes in its header."""
    from gguf import GGUFWriter

    def size(usual: int) -> int:
        return usual if draw is None else draw.choice([usual, usual, 0, 1, 10**6, 2**31, 2**32 - 1])

    writer = GGUFWriter(path, "llama" if draw is None else draw.choice(["llama", "llama", "gemma3", "x", ""]))
    writer.add_block_count(size(1))
    writer.add_embedding_length(size(64))
    writer.add_head_count(size(4))
    writer.add_head_count_kv(size(2))
    writer.add_feed_forward_length(size(96))
    writer.add_context_length(size(512))
    writer.add_tensor("token_embd.weight", np.zeros((100, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def lend(world: Path, name: str, folder: Path, to: str | None = None) -> Path:
    """Copies a file or folder of the world into a case's folder."""
    target = folder / (to or name)
    target.parent.mkdir(parents=True, exist_ok=True)
    copy = shutil.copytree if (world / name).is_dir() else shutil.copyfile
    copy(world / name, target)
    return target
