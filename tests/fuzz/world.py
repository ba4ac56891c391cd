"""What the cases damage: small checkpoints, runs, a baseline, a policy, texts, recordings, pictures. Made once."""

from __future__ import annotations

import contextlib
import copy
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
ARMS = ("keys:first1", "kv:3", "value:first1")
ARMS_OPTIONS: dict[str, Any] = {"seq_len": 16, "num_sequences": 4, "draws": 2}
"""The measurement of arms that stopped half-way."""
CHATS = [
    {"messages": [{"role": role, "content": content} for role, content in chat]}
    for chat in (
        [("system", "Be brief."), ("user", "Why is the sky blue?"), ("assistant", "Air scatters blue light more.")],
        [("user", "Name a river."), ("assistant", "The Rhine."), ("user", "And the longest one?")],
        [("user", "A very short one.")],
        [("user", "user"), ("assistant", "Once more.")],
    )
]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
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
    _talker(folder / "talker", tokenizer)
    _adapter(folder)
    _training(folder)
    _arms(folder)


def _runs(folder: Path) -> None:
    from sinkscope import scan
    from sinkscope.comparison.baseline import baseline_of, baseline_text

    common: dict[str, Any] = {"seq_len": 16, "num_sequences": 4, "self_check": False}
    tiny = str(folder / "tiny")
    run = scan(tiny, data=["prose", "code"], bos="auto", smoothing=True, **common)
    run.save(folder / "a")
    scan(tiny, data=["prose", "code"], bos="auto", dtype="bfloat16", **common).save(folder / "b")
    scan(tiny, data="random", **common).save(folder / "c")
    scan(tiny, measure="all", **common).save(folder / "all")
    (folder / "baseline.json").write_text(baseline_text(baseline_of(run)), "utf-8")


def _talker(folder: Path, tokenizer: Any) -> None:
    """A causal model with a chat template."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, vocab_size=len(tokenizer), max_position_embeddings=128,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    talking = copy.deepcopy(tokenizer)
    talking.chat_template = TEMPLATE
    talking.save_pretrained(folder)


def _adapter(folder: Path) -> None:
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_pretrained(folder / "tiny")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, settings).save_pretrained(folder / "adapter")


def _training(folder: Path) -> None:
    from typer.testing import CliRunner

    from sinkscope.cli import app

    for step in (20, 100):
        shutil.copytree(folder / "tiny", folder / "training" / f"checkpoint-{step}")
    words = ["--data", "random", "--seq-len", "16", "--num-sequences", "3", "--bos", "never", "--quiet"]
    with contextlib.chdir(folder / "training"):  # the names that the cases use
        done = CliRunner().invoke(app, ["track", "checkpoint-20", "checkpoint-100", *words, "--out", "../tracked"])
    assert done.exit_code == 0, done.stderr


def _arms(folder: Path) -> None:
    """A measurement of arms that Ctrl-C ended after half of its batches."""
    from unittest.mock import patch

    from sinkscope import arms

    def stop(stage: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    options = ARMS_OPTIONS | {"shards": folder / "arms", "progress": stop}
    with patch("sinkscope.experiments.arms.engine.batch_size", lambda model, length: 1):
        try:
            arms(str(folder / "tiny"), ARMS, **options)
        except KeyboardInterrupt:
            return
    raise AssertionError("it was not stopped")


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
