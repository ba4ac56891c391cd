"""Runs a loaded model of any family: one pass, over a probe or with eager attention, and writing after a prompt."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from sinkscope.capture.private_doors import capturing, forward_hooks, is_out_of_memory, set_capturing
from sinkscope.capture.quiet_logs import quiet_logs
from sinkscope.capture.registries import renamed, uncompiled
from sinkscope.capture.sites import TEXT_INPUTS, main_input
from sinkscope.checkpoints.checkpoint import Checkpoint, add_facts, configuration
from sinkscope.checkpoints.classes import unwrapped
from sinkscope.errors import SinkscopeError, first_line
from sinkscope.inputs.signals import KINDS


class Forward:
    """Runs a base model on token ids, on pictures or sound, or on real vectors.

    An encoder-decoder reads the same text on both sides; the decoder's copy begins with its start token. Where the
    encoder reads sound, the decoder reads `decoder_input_ids`, or its start token alone. `signal`: the keyword of the
    pictures or sound that the model reads instead of text, or None. `takes`: all signal keywords of its forward. Raises
    SinkscopeError for a model whose main input is of another kind.
    """

    def __init__(self, model: nn.Module) -> None:
        needs = main_input(model)
        if needs not in (*TEXT_INPUTS, *KINDS):
            raise SinkscopeError(f"{type(model).__name__} reads {needs}, which sinkscope cannot give it")
        self.model = model
        self.signal = needs if needs in KINDS else None
        self._accepted = set(inspect.signature(model.forward).parameters) | _handed_on(model)
        self.takes = self._accepted.intersection(KINDS)
        config = configuration(model)
        self.decodes = "decoder_input_ids" in self._accepted and bool(getattr(config, "is_encoder_decoder", False))
        start = getattr(config, "decoder_start_token_id", None)
        self.start = start if isinstance(start, int) else None
        canvas = getattr(config, "canvas_length", None)
        self._canvas = canvas if "decoder_input_ids" in self._accepted and not self.decodes else None

    @property
    def decoder_input(self) -> str | None:
        """Describes for the manifest what a model's separate decoder reads; None for other models."""
        if self._canvas is not None:
            return f"a canvas of {self._canvas} tokens, drawn once: what denoising starts from"
        if not self.decodes:
            return None
        if self.signal is not None:
            return f"decoder_start_token_id {self.start} alone"
        if self.start is None:
            return "the encoder's text"
        return f"the encoder's text after decoder_start_token_id {self.start}, without its last token"

    def at_position_zero(self, inputs: torch.Tensor) -> Any:
        """Runs with every token at position 0, where rotary embeddings change nothing.

        A model whose forward takes no `position_ids` runs as usual.
        """
        if "position_ids" not in self._accepted or inputs.is_floating_point():
            return self(inputs)
        return self(inputs, position_ids=torch.zeros_like(inputs))

    def __call__(self, inputs: torch.Tensor, mask: torch.Tensor | None = None, **extra: Any) -> Any:
        """`inputs`: ids (B, T), vectors (B, T, d) or a signal (B, ...), any float type. `mask`: 1 = token, 0 = padding,
        which stands on the right, so that every sequence's positions count from its first token.

        Runs without a cache, so that layers that share keys see every query.
        """
        arguments: dict[str, Any] = {"use_cache": False, **extra}
        if mask is not None:
            self._check_padding()
            arguments["attention_mask"] = mask
        if self.decodes and self.signal is not None:
            start = torch.full((len(inputs), 1), self.start or 0, device=inputs.device)
            arguments = {"decoder_input_ids": start, **arguments}
        elif self.decodes:
            arguments |= {"decoder_input_ids": self._decoder_ids(inputs), "decoder_attention_mask": mask}
        if self._canvas is not None:
            arguments = {"decoder_input_ids": self._blank_canvas(inputs), **arguments}
        accepted = {name: value for name, value in arguments.items() if name in self._accepted or name in extra}
        if inputs.is_floating_point():
            name, inputs = self.signal or "inputs_embeds", inputs.to(next(self.model.parameters()).dtype)
        else:
            name = next((key for key in ("input_ids", "inputs") if key in self._accepted), "")  # Perceiver: inputs
        with quiet_logs():
            if not name:  # a module that is no transformers model takes its tokens first, whatever their name
                return self.model(inputs, **accepted)
            return self.model(**{name: inputs}, **accepted)

    def _check_padding(self) -> None:
        """Raises SinkscopeError for a module that would read padding as text."""
        if configuration(self.model) is None and "attention_mask" not in self._accepted:
            raise SinkscopeError(
                f"{type(self.model).__name__} takes no attention_mask, so it would read padding as text: give "
                "sequences of equal length"
            )

    def _blank_canvas(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the same random tokens for every sequence and pass; by itself a diffusion model draws new ones."""
        size: int = self.model.config.get_text_config().vocab_size  # type: ignore[union-attr, operator]
        drawn = torch.randint(size, (1, self._canvas or 0), generator=torch.Generator().manual_seed(0))
        return drawn.to(ids.device).expand(len(ids), -1)

    def _decoder_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """Shifts the text right by one and puts the decoder's start token first."""
        if self.start is None:
            return ids
        return torch.cat([torch.full_like(ids[:, :1], self.start), ids[:, :-1]], -1)


def _handed_on(model: nn.Module) -> set[str]:
    """Keywords that the forward of a model of transformers does not name, and hands on to its language model, as
    OmniASR's does."""
    parameters = inspect.signature(model.forward).parameters
    if not type(model).__module__.startswith("transformers.") or not hasattr(model, "get_decoder"):
        return set()
    inner = model.get_decoder()  # type: ignore[operator]
    several = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    takes_text = "input_ids" in parameters and "attention_mask" not in parameters
    if inner is model or not isinstance(inner, nn.Module) or not several or not takes_text:
        return set()
    return {"attention_mask", "position_ids", "use_cache"} & set(inspect.signature(inner.forward).parameters)


DRY_RUN_TOKENS = 16
SEVERAL = DRY_RUN_TOKENS, 4
"""Sequences and tokens of each, of `several_probes`."""


def probe(checkpoint: Checkpoint) -> torch.Tensor:
    """One sequence of DRY_RUN_TOKENS token ids, [1, token]."""
    return torch.arange(DRY_RUN_TOKENS, device=checkpoint.device).remainder(checkpoint.vocabulary)[None]


def several_probes(checkpoint: Checkpoint) -> torch.Tensor:
    """SEVERAL token ids, [sequence, token], all different where the vocabulary has that many."""
    count, length = SEVERAL
    ids = torch.randperm(max(checkpoint.vocabulary, count * length), generator=torch.Generator().manual_seed(0))
    ids = ids[: count * length].remainder(checkpoint.vocabulary)
    return ids.view(count, length).to(checkpoint.device)


@contextmanager
def eager(model: nn.Module) -> Iterator[None]:
    """Sets every configuration of the model's modules to `eager` attention for the block, then restores each.

    The hooks by which transformers collects maps, once a pass asks for them, are removed again.
    """
    with uncompiled(), renamed(model, lambda owner, name: "eager"), _hooks_kept(model):
        yield


@contextmanager
def _hooks_kept(model: nn.Module) -> Iterator[None]:
    """Removes the hooks that transformers adds during the block. It adds them once, and by itself never removes one."""
    before = [(module, set(forward_hooks(module)), capturing(module)) for module in model.modules()]
    try:
        yield
    finally:
        for module, numbers, state in before:
            hooks = forward_hooks(module)
            for number, hook in list(hooks.items()):
                if number not in numbers and getattr(hook, "__module__", "").startswith("transformers."):
                    del hooks[number]
            if capturing(module) != state:
                set_capturing(module, state)


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
    out, except the tokens at which it ends. Raises SinkscopeError where the model cannot go on.
    """
    writer: Any = checkpoint.writer
    ends = getattr(writer.generation_config, "eos_token_id", None)
    settings = type(writer.generation_config)(
        do_sample=False, num_beams=1, max_new_tokens=count, use_cache=True, eos_token_id=deepcopy(ends),
        pad_token_id=0,  # one prompt at a time: nothing is padded, and transformers asks for an id
    )  # fmt: skip
    ids = torch.tensor([prompt], device=checkpoint.device)
    try:
        with torch.no_grad(), quiet_logs():
            made = writer.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        if is_out_of_memory(error):  # out of memory
            raise
        raise SinkscopeError(f"--generate: {type(writer).__name__} cannot go on writing: {first_line(error)}") from None
    return [int(token) for token in made[0, len(prompt) :]]
