"""Calls a base model of any family on token ids, signals or vectors, with the keywords that its forward takes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.signals import KINDS


class Forward:
    """Runs a base model on token ids, on pictures or sound, or on real vectors.

    An encoder-decoder reads the same text on both sides; the decoder's copy begins with its start token. Where the
    encoder reads sound, the decoder reads `decoder_input_ids`, or its start token alone. `signal`: the keyword of the
    pictures or sound that the model reads instead of text, or None. `takes`: all signal keywords of its forward. Raises
    SinkscopeError for a model whose main input is of another kind.
    """

    def __init__(self, model: nn.Module) -> None:
        needs = getattr(model, "main_input_name", "input_ids")
        if needs not in ("input_ids", "inputs_embeds", "inputs", *KINDS):
            raise SinkscopeError(f"{type(model).__name__} reads {needs}, which sinkscope cannot give it")
        self.model = model
        self.signal = needs if needs in KINDS else None
        self._accepted = set(inspect.signature(model.forward).parameters)
        self.takes = self._accepted.intersection(KINDS)
        config: Any = model.config
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
            name = self.signal or "inputs_embeds"
            return self.model(**{name: inputs.to(next(self.model.parameters()).dtype)}, **accepted)
        name = "input_ids" if "input_ids" in self._accepted else "inputs"  # Perceiver's keyword
        return self.model(**{name: inputs}, **accepted)

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
