"""The contract of an input kind, and what it reads: the sequences of a scan."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward, probe, several_probes
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import Corpus, TokenRules
from sinkscope.inputs.batches import TokenData, batches
from sinkscope.inputs.rules import first_token
from sinkscope.inputs.signals import KINDS, PIXELS
from sinkscope.runs.questions import questions_asked
from sinkscope.runs.request import Request
from sinkscope.tables.values import Domain, text_regions

if TYPE_CHECKING:
    import pandas as pd


class InputKind(ABC):
    """One kind of input. The kind that claims a request is created for that scan.

    A subclass must define `name`, `asked_for` and `read`; unless it overrides the probes, the dry run takes a few token
    ids. The constructor and `read` raise SinkscopeError for what cannot be read.
    """

    name: ClassVar[str]
    """The kind's name, such as `text` or `token ids`."""
    continues: ClassVar[bool] = False
    """Whether the model can write on after its sequences."""

    def __init__(self, request: Request, checkpoint: Checkpoint, forward: Forward) -> None:
        if request.generate is not None and not self.continues:
            raise SinkscopeError(f"--generate continues text, but {checkpoint.name} reads {self.name} here")
        self.request, self.checkpoint, self.forward = request, checkpoint, forward

    @classmethod
    @abstractmethod
    def asked_for(cls, request: Request) -> bool:
        """Whether the request, before any model is loaded, asks for this kind."""

    @classmethod
    def claims(cls, request: Request, checkpoint: Checkpoint, forward: Forward) -> bool:
        """Whether this kind answers the request for this model, by reading it or by raising why it cannot be read."""
        return cls.asked_for(request)

    @classmethod  # noqa: B027 a kind may have nothing to check without the model
    def check(cls, request: Request) -> None:
        """Raises SinkscopeError for a request that no model can read; called before a model is loaded."""

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns one short input for the dry run, [1, ...], and the model's other inputs, by keyword."""
        return probe(self.checkpoint), {}

    def other_probe(self, ids: Tensor, given: Collection[str]) -> Tensor | None:
        """Returns the token ids of the probe with another one at every position. None where there are other inputs, no
        ids, or ids that repeat."""
        turned = ids.roll(1, -1)
        return None if given or ids.is_floating_point() or bool((turned == ids).any()) else turned

    def signal_to_give(self, given: Collection[str]) -> str:
        """What the error of a model that fails on the probe says of pictures or sound that it takes beside text, as
        CLIP does; nothing where these are `given`."""
        signal = next((name for name in KINDS if name in self.forward.takes - {*given}), None)
        if signal is None or self.forward.signal is not None:
            return ""
        folder = f"{KINDS[signal].option} FOLDER, or " if signal == PIXELS else ""
        return f"; it takes {signal}, too: give {folder}what its processor returns, in Python"

    def several_probes(self) -> Tensor:
        """Returns short inputs that differ, for the search for W_V. Raises SinkscopeError where the kind has none."""
        return several_probes(self.checkpoint)

    @abstractmethod
    def read(self, positions: int) -> Reading:
        """Reads the sequences. `positions`: attention positions of the dry run. Raises SinkscopeError."""

    def regions(self, ids: np.ndarray, rules: TokenRules) -> np.ndarray | None:
        """Returns the region of each position, [sequence, T], by name: `special` or `text`, and "" past a sequence's
        end (id -1). None where positions hold no tokens: `engine.places` then names them by stream and model."""
        return text_regions(ids, rules.special)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        """Returns the entries of summary.json that only this kind has. `positions`: the run's table of that name."""
        return {}


@dataclass(frozen=True)
class Reading:
    """The sequences of a scan.

    Attributes:
        rules: special tokens, and which ids exist.
        corpora: one per domain. tokens: the model's input for each, in the same order.
        tokenizer: gives the ids their names; None where tables show the ids.
        kind: the input kind that read them.
        decoder_input: describes the decoder's input where it differs from `Forward.decoder_input`.
    """

    rules: TokenRules
    corpora: list[Corpus]
    tokens: list[TokenData]
    tokenizer: Any
    kind: InputKind
    decoder_input: str | None = None

    @property
    def total(self) -> int:
        """Sequences in all."""
        return sum(len(data.ids) for data in self.tokens)

    def measures(self, asked: tuple[str, ...]) -> tuple[str, ...]:
        """The questions asked, and those that these sequences ask for by themselves, in the order of all questions."""
        have_regions = any(corpus.regions is not None for corpus in self.corpora)
        return questions_asked((*asked, "regions")) if have_regions else asked

    @property
    def warnings(self) -> list[str]:
        """What the corpora warn of, in their order."""
        return [warning for corpus in self.corpora for warning in corpus.warnings]

    def first_token(self, domains: int | None = None) -> dict[str, Any]:
        """Id, text and kind of the first token over the first `domains` corpora."""
        return first_token([corpus.ids for corpus in self.corpora[:domains]], self.rules, self.tokenizer)

    def first_sequence(self, device: torch.device) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The valid tokens of the first sequence, [1, length], and the model's other inputs for it."""
        batch = next(batches(self.tokens[0], 0, 1, device))
        inputs = batch.inputs if batch.spans is None else batch.inputs[:, slice(*batch.spans[0])]
        return inputs, batch.extra
