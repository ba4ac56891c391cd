"""Small language models that write, their prompts, and the one pass over prompt and answer."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from models import _COMMON, _GROUPED, _OWN, VOCABULARY
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM

import sinkscope

NEW = 24
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
"""What transformers calls the cache that a model is given: the first from 5.24 on."""


def writer(family: str, **overrides: Any) -> Any:
    """A small language model that writes, of a family of models.py or of a model_type; the sliding window of those that
    have one is 16."""
    model_type, own = _OWN.get(family, (family, _GROUPED))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = AutoConfig.for_model(model_type, **{**_COMMON, **own, **overrides})
        return AutoModelForCausalLM.from_config(config).eval()


def prompt(left: int = 0) -> dict[str, Tensor]:
    """Two prompts of 12 tokens; the second has `left` tokens of padding before it."""
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :left] = 0
    return {"input_ids": ids, "attention_mask": mask}


def generate(model: Any, given: dict[str, Tensor], **settings: Any) -> Tensor:
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "pad_token_id": 0} | settings
    written: Tensor = model.generate(**given, **settings)
    return written


def in_one_pass(model: Any, written: Tensor, given: dict[str, Tensor]) -> sinkscope.Run:
    """A scan of prompt and answer; the last token was written, but never read."""
    ids = written[:, :-1]
    mask = torch.ones_like(ids)
    mask[:, : given["attention_mask"].shape[1]] = given["attention_mask"]
    return sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, self_check=False)
