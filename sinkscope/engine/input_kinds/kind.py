"""The contract of an input kind, and the part of a request that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.probes import probe, several_probes
from sinkscope.engine.reading import Reading
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import TokenRules
from sinkscope.runs.places import text_regions
from sinkscope.runs.request import Request
from sinkscope.runs.values import Domain

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Asked:
    """The part of a request that says what to read.

    Attributes:
        given: data handed over in Python instead of SPECs, or None.
        specs: SPECs, or None.
        bos: BOS modes; each makes a domain of every SPEC.
        first, prepend: in place of `bos`: first tokens, and numbers of tokens before them; every combination makes a
            domain of every SPEC.
        images, audio: a folder of pictures or of recordings. prompt: the text beside each.
        seq_len, num_sequences: None = the kind's default.
        generate: tokens that the model writes after each sequence; None = none.
        seed: draws documents and synthetic data.
    """

    given: Any = None
    specs: tuple[str, ...] | None = None
    bos: tuple[str, ...] = ("auto",)
    first: tuple[str, ...] = ()
    prepend: tuple[int, ...] = ()
    images: str | Path | None = None
    audio: str | Path | None = None
    prompt: str | None = None
    seq_len: int | None = None
    num_sequences: int | None = None
    generate: int | None = None
    seed: int = 0


def asked_of(request: Request) -> Asked:
    """Returns the part of a request that says what to read."""
    return Asked(
        given=request.handed,
        specs=request.data,
        bos=request.bos,
        first=request.first,
        prepend=request.prepend,
        images=request.images,
        audio=request.audio,
        prompt=request.prompt,
        seq_len=request.seq_len,
        num_sequences=request.num_sequences,
        generate=request.generate,
        seed=request.seed,
    )


class InputKind(ABC):
    """One kind of input. The kind that claims a request is created for that scan.

    A subclass must define `name`, `asked_for` and `read`; unless it overrides the probes, the dry run takes a few token
    ids. The constructor and `read` raise SinkscopeError for what cannot be read.
    """

    name: ClassVar[str]
    """The kind's name, such as `text` or `token ids`."""
    continues: ClassVar[bool] = False
    """Whether the model can write on after its sequences."""

    def __init__(self, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> None:
        if asked.generate is not None and not self.continues:
            raise SinkscopeError(f"--generate goes on after text; {checkpoint.name} reads {self.name} here")
        self.asked, self.checkpoint, self.forward = asked, checkpoint, forward

    @classmethod
    @abstractmethod
    def asked_for(cls, asked: Asked) -> bool:
        """Whether the request, before any model is loaded, asks for this kind."""

    @classmethod
    def claims(cls, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> bool:
        """Whether this kind answers the request for this model, by reading it or by raising why it cannot be read."""
        return cls.asked_for(asked)

    @classmethod  # noqa: B027 a kind may have nothing to check without the model
    def check(cls, asked: Asked) -> None:
        """Raises SinkscopeError for a request that no model can read; called before a model is loaded."""

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns one short input for the dry run, [1, ...], and the model's other inputs, by keyword."""
        return probe(self.checkpoint), {}

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
