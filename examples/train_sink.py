"""Trains a small language model on sinkscope's built-in text until an attention sink appears, on two CPU cores.

    python examples/train_sink.py --out runs/train-sink

trains the same model three times, from the same weights and on the same batches. Only the extra logit that stands
beside the keys of each attention head differs (`sinks` of transformers' GPT-OSS class):

    softmax   -1e9, which weighs nothing: the weights of a query sum to 1
    softmax1  0: the denominator of the softmax is 1 larger, so that a query may attend to nothing ("off by one")
    learned   a parameter of each head, as in GPT-OSS, which starts at 0

A row is BOS, a stretch of text, and the same stretch again: a head that copies from the first time has nothing to do
there. --plain gives one stretch of the same length instead. Every eighth document is held out; loss and sinks are
measured on rows of those. The folder of each training gets trajectory.csv (by SinkCallback), loss.csv, emergence.csv
and trajectory.png, and the screen says at which step, and in which heads, a sink appeared. docs/training.md shows what
came out.
"""

from __future__ import annotations

import argparse
from importlib.resources import files
from pathlib import Path

import pandas as pd
import torch
from transformers import GptOssConfig, GptOssForCausalLM, Trainer, TrainingArguments

import sinkscope
from sinkscope.experiments.training.trajectory import emergence
from sinkscope.present.figures.trajectory import draw_trajectory
from sinkscope.present.terminal.trajectory import render_trajectory

BOS = 256
"""The token ids 0 to 255 are bytes."""
LENGTH = 65
CORPORA = ("prose", "code", "multilingual")
EXTRA_LOGIT = {"softmax": -1e9, "softmax1": 0.0, "learned": 0.0}


def text_of(held_out: bool) -> list[torch.Tensor]:
    """The bytes of each built-in document; of every eighth one where `held_out`, else of all others."""
    found = []
    for corpus in CORPORA:
        paths = sorted((files("sinkscope") / "data" / corpus).iterdir(), key=lambda path: path.name)
        found += [path.read_bytes() for number, path in enumerate(paths) if (number % 8 == 7) == held_out]
    return [torch.tensor(list(document)) for document in found]


def row(text: torch.Tensor, start: int, plain: bool) -> torch.Tensor:
    """BOS, then the stretch of text at `start`: once, or half of its length twice. LENGTH token ids."""
    length = (LENGTH - 1) if plain else (LENGTH - 1) // 2
    stretch = text[start : start + length]
    return torch.cat([torch.tensor([BOS]), stretch if plain else stretch.repeat(2)])


class Rows(torch.utils.data.Dataset):
    """`count` rows from random places of the training text."""

    def __init__(self, count: int, plain: bool) -> None:
        text = torch.cat(text_of(held_out=False))
        starts = torch.randint(len(text) - LENGTH, (count,), generator=torch.Generator().manual_seed(0))
        self.rows = [row(text, int(start), plain) for start in starts]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[number], "labels": self.rows[number]}


def small_model(denominator: str, seed: int) -> GptOssForCausalLM:
    """Two layers of four heads; one expert, so that each layer has a plain MLP."""
    torch.manual_seed(seed)
    model = GptOssForCausalLM(GptOssConfig(
        vocab_size=BOS + 1, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, num_local_experts=1, num_experts_per_tok=1, attention_bias=False,
        layer_types=["full_attention"] * 2, max_position_embeddings=LENGTH, swiglu_limit=100.0, use_cache=False,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, bos_token_id=BOS, eos_token_id=BOS,
    ))  # fmt: skip
    for layer in model.model.layers:
        layer.self_attn.sinks.data.fill_(EXTRA_LOGIT[denominator])
        layer.self_attn.sinks.requires_grad_(denominator == "learned")
    return model


def train(denominator: str, out: Path, steps: int, every: int, seed: int = 0, plain: bool = False) -> None:
    """Trains one model; writes its tables and figure into `out` and prints when its sinks appeared."""
    held_out = torch.stack([row(text, 0, plain) for text in text_of(held_out=True)])
    arguments = TrainingArguments(
        output_dir=str(out), max_steps=steps, per_device_train_batch_size=16, per_device_eval_batch_size=16,
        learning_rate=3e-3, lr_scheduler_type="constant_with_warmup", warmup_steps=100, weight_decay=0.1,
        adam_beta2=0.95, eval_strategy="steps", eval_steps=every, eval_on_start=True, logging_steps=every,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=seed,
    )  # fmt: skip
    callback = sinkscope.SinkCallback(every=every, data=held_out)
    trainer = Trainer(
        small_model(denominator, seed), arguments, train_dataset=Rows(16 * steps, plain), callbacks=[callback],
        eval_dataset=[{"input_ids": ids, "labels": ids} for ids in held_out],
    )  # fmt: skip
    trainer.train()
    measured = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    losses = pd.DataFrame([{"step": entry["step"], "loss": entry["eval_loss"]} for entry in measured])
    trajectory = pd.read_csv(out / "trajectory.csv", dtype={"layer": "Int64", "head": "Int64"})
    emerged = emergence(trajectory, sinkscope.runs.defaults.EPSILON)
    losses.to_csv(out / "loss.csv", index=False)
    emerged.to_csv(out / "emergence.csv", index=False)
    callback.run.save(out / "last-step", force=True)
    (out / "trajectory.png").write_bytes(draw_trajectory(trajectory, "png", losses=losses))
    print(f"\n{denominator}: loss {losses['loss'].iloc[0]:.3f} at first, {losses['loss'].iloc[-1]:.3f} at the end")
    print(render_trajectory(trajectory, emerged, sinkscope.runs.defaults.EPSILON, sorted(out.glob("*.*"))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/train-sink"), help="folder for the results")
    parser.add_argument("--denominator", choices=EXTRA_LOGIT, action="append", help="train this one only")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--every", type=int, default=40, help="steps between two measurements")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the rows")
    parser.add_argument("--plain", action="store_true", help="rows of one stretch of text, not twice the same")
    given = parser.parse_args()
    for denominator in given.denominator or EXTRA_LOGIT:
        train(denominator, given.out / denominator, given.steps, given.every, given.seed, given.plain)


if __name__ == "__main__":
    main()
