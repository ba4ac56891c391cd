"""Lets a language model go on writing after a prompt, greedily, with its own cache."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from accelerate.utils.memory import should_reduce_batch_size

from sinkscope.checkpoints.checkpoint import Checkpoint, add_facts
from sinkscope.checkpoints.loading import unwrapped
from sinkscope.checkpoints.sources import first_line
from sinkscope.errors import SinkscopeError


def keep_writer(checkpoint: Checkpoint) -> None:
    """Keeps the whole language model as the checkpoint's `writer` and measures its base model, as every scan does.

    Raises SinkscopeError for a model that writes no text.
    """
    writer: Any = checkpoint.model
    if not (hasattr(writer, "generate") and writer.can_generate()):
        raise SinkscopeError(f"--generate: {checkpoint.name} ({type(writer).__name__}) writes no text")
    checkpoint.writer, checkpoint.model = writer, unwrapped(writer)
    add_facts(checkpoint)


def written(checkpoint: Checkpoint, prompt: list[int], count: int) -> list[int]:
    """The tokens that the model writes after a prompt: the likeliest at each step, at most `count`; it may end before.

    The settings of the checkpoint's own generation_config.json, such as a penalty for repetition or sampling, are left
    out, but for the tokens at which it ends. Raises SinkscopeError where the model cannot go on.
    """
    writer: Any = checkpoint.writer
    ends = getattr(writer.generation_config, "eos_token_id", None)
    settings = type(writer.generation_config)(
        do_sample=False, num_beams=1, max_new_tokens=count, use_cache=True, eos_token_id=deepcopy(ends),
        pad_token_id=0,  # one prompt at a time: nothing is padded, and transformers asks for an id
    )  # fmt: skip
    ids = torch.tensor([prompt], device=checkpoint.device)
    try:
        with torch.no_grad():
            made = writer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    except (RuntimeError, TypeError, ValueError, NotImplementedError, AttributeError) as error:
        if should_reduce_batch_size(error):  # out of memory
            raise
        raise SinkscopeError(f"--generate: {type(writer).__name__} cannot go on writing: {first_line(error)}") from None
    return [int(token) for token in made[0, len(prompt) :]]
