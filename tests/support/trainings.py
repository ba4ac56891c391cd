"""A tiny causal model, and short trainings of it by transformers' Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from models import VOCABULARY
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import sinkscope

STEPS = 6


def causal_llama(**overrides: Any) -> LlamaForCausalLM:
    """A tiny model with dropout, so that a disturbed random state would show."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "attention_dropout": 0.1,
    }  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | overrides))


def ids(count: int, length: int = 24) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (count, length), generator=torch.Generator().manual_seed(1))


def rows() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row, "labels": row} for row in ids(32)]


def trained(folder: Path, callbacks: list[TrainerCallback], model: nn.Module | None = None, **settings: Any) -> Trainer:
    torch.manual_seed(1)
    arguments = TrainingArguments(**{
        "output_dir": str(folder), "max_steps": STEPS, "per_device_train_batch_size": 4, "logging_steps": 1,
        "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True, "seed": 3, **settings,
    })  # fmt: skip
    trainer = Trainer(model or causal_llama(), arguments, train_dataset=rows(), callbacks=callbacks)
    trainer.train()
    return trainer


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def callback(**settings: Any) -> sinkscope.SinkCallback:
    return sinkscope.SinkCallback(**{"every": 2, "data": ids(4), **settings})
