"""TRL fine-tunes a small Llama, with SinkCallback in its trainer: finetune.py FOLDER (of a tokenizer)."""

import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

from sinkscope import SinkCallback

TEXTS = ["The river runs to the sea.", "A small boat went down the river and out to the sea, and came back at night."]


def load(folder: str) -> Any:
    """A trainer: what it trains is its `model`."""
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ))  # fmt: skip
    settings = SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
        save_strategy="no", report_to=[], use_cpu=True, bf16=False, seed=0, disable_tqdm=True,
    )  # fmt: skip
    beside = SinkCallback(every=1, data=torch.arange(40)[None])
    return SFTTrainer(
        model, args=settings, train_dataset=Dataset.from_dict({"text": TEXTS * 4}), processing_class=tokenizer,
        callbacks=[beside],
    )  # fmt: skip


def work(trainer: Any) -> torch.Tensor:
    """The losses and the last weights, in one row."""
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = [weight.detach().flatten() for weight in trainer.model.parameters()]
    return torch.cat([torch.tensor(losses), *weights])


if __name__ == "__main__":
    work(load(sys.argv[1]))
