"""Text with pictures or sound in it: vision- and audio-language models."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.checkpoint import check_length
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.input_kinds.kind import InputKind, Reading
from sinkscope.engine.input_kinds.signals import named_by_files, refuse_text_settings, signal_asked_for
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import TokenRules, token_rules
from sinkscope.inputs.batches import batches, token_data
from sinkscope.inputs.corpus import warn_of_count
from sinkscope.inputs.images import processed
from sinkscope.inputs.signals import IMAGE, PIXELS, ImageNames, Sighted, image_token, joined, sighted_data, signal_name
from sinkscope.runs.request import Request
from sinkscope.tables.image_tokens import image_tokens
from sinkscope.tables.values import Domain, text_regions

if TYPE_CHECKING:
    import pandas as pd


CONTRASTIVE = ("text_model", "vision_model", "logit_scale")
"""What CLIP and its like hold: a tower for each input, and the scale of the products of what these return."""


class SignalTextInput(InputKind):
    """Reads what a model's processor returns for text with pictures or sound, sequence by sequence."""

    name: ClassVar[str] = "signals with text"

    def __init__(self, request: Request, checkpoint: Checkpoint, forward: Forward) -> None:
        super().__init__(request, checkpoint, forward)
        self._image = image_token(checkpoint.model.config)
        self._read = self._from_folder() if request.handed is None else self._given()
        refuse_text_settings(request)
        check_length(checkpoint, self._read.tokens.longest)

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return signal_name(request.handed) is not None and "input_ids" in request.handed

    @classmethod
    def claims(cls, request: Request, checkpoint: Checkpoint, forward: Forward) -> bool:
        signal = signal_asked_for(request, forward)
        beside_text = forward.signal is None or (request.images is not None and forward.signal != PIXELS)
        return signal in forward.takes and beside_text

    @classmethod
    def check(cls, request: Request) -> None:
        refuse_text_settings(request)
        handed = request.handed
        token_data({name: handed[name] for name in ("input_ids", "attention_mask") if name in handed}, None)

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        batch = next(batches(self._read.tokens, 0, 1, self.checkpoint.device))
        return batch.inputs, batch.extra

    def read(self, positions: int) -> Reading:
        tokenizer = self.checkpoint.tokenizer
        rules = token_rules(tokenizer, self.checkpoint.vocabulary)
        names = ImageNames(tokenizer, self._image)
        corpus = named_by_files(self._read.corpus(), self.request)
        warn_of_count(corpus, self.request.num_sequences or 0)
        return Reading(rules, [corpus], [self._read.tokens], names, self)

    def regions(self, ids: np.ndarray, rules: TokenRules) -> np.ndarray | None:
        regions = text_regions(ids, rules.special)
        return regions if self._image is None else np.where(ids == self._image, IMAGE, regions)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        """Returns how much attention the text pays to pictures, where the configuration names their token."""
        return {} if self._image is None else {"image_tokens": image_tokens(domains[0], sites, self._image)}

    def _given(self) -> Sighted:
        request, vocabulary = self.request, self.checkpoint.vocabulary
        with _naming_towers(self.checkpoint.model):
            read = sighted_data(request.handed, request.num_sequences, vocabulary, self._image)
        if read is None:
            name = type(self.checkpoint.model).__name__
            raise SinkscopeError(
                f"{name} reads token ids, not {signal_name(request.handed)} alone: give the input_ids with them"
            )
        return read

    def _from_folder(self) -> Sighted:
        request = self.request
        if request.images is None:
            raise SinkscopeError("--audio: this model reads sound with text; give its processor's tensors in Python")
        count, origin = request.num_sequences, self.checkpoint.origin
        sequences = processed(request.images, request.prompt, count, origin, alone=False)
        return joined(sequences, self.checkpoint.vocabulary)


@contextmanager
def _naming_towers(model: Any) -> Iterator[None]:
    """Adds to an error of texts and pictures that belong to no common sequence how a model such as CLIP, whose towers
    attend apart, reads each of them."""
    try:
        yield
    except SinkscopeError as error:
        if not all(hasattr(model, name) for name in CONTRASTIVE):
            raise
        raise SinkscopeError(
            f"{error}; its texts and pictures attend apart: scan its text_model and its vision_model by themselves"
        ) from None
