"""The contract of an input kind, and the part of a request that it reads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from sinkscope.capture import Site
from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.forward import Forward
from sinkscope.checkpoints.probes import probe, several_probes
from sinkscope.engine.reading import Reading
from sinkscope.runs.request import Request
from sinkscope.runs.values import Domain

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Asked:
    """What is to be read.

    Attributes:
        given: data handed over in Python in the place of SPECs; None where there are none.
        specs: SPECs; None where none is named.
        bos: BOS modes; each makes a domain of every SPEC.
        images, audio: a folder of pictures or of recordings. prompt: the text beside each.
        seq_len, num_sequences: None = the kind's own.
        seed: draws documents and synthetic data.
    """

    given: Any = None
    specs: tuple[str, ...] | None = None
    bos: tuple[str, ...] = ("auto",)
    images: str | Path | None = None
    audio: str | Path | None = None
    prompt: str | None = None
    seq_len: int | None = None
    num_sequences: int | None = None
    seed: int = 0


def asked_of(request: Request) -> Asked:
    """The part of a request that says what is read."""
    return Asked(
        given=request.handed,
        specs=request.data,
        bos=request.bos,
        images=request.images,
        audio=request.audio,
        prompt=request.prompt,
        seq_len=request.seq_len,
        num_sequences=request.num_sequences,
        seed=request.seed,
    )


class InputKind(ABC):
    """One kind of input, for one scan: made where it claims the request, refusing what it cannot read.

    A kind of one's own says what it is `asked_for` and how it is `read`; the dry run then takes a few token ids, as the
    kinds do that give the model token ids. Raises SinkscopeError, also when it is made, for what cannot be read.
    """

    name: ClassVar[str]
    """What it is called, such as `text` or `token ids`."""

    def __init__(self, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> None:
        self.asked, self.checkpoint, self.forward = asked, checkpoint, forward

    @classmethod
    @abstractmethod
    def asked_for(cls, asked: Asked) -> bool:
        """Whether the request, before any model is loaded, asks for this kind."""

    @classmethod
    def claims(cls, asked: Asked, checkpoint: Checkpoint, forward: Forward) -> bool:
        """Whether this kind answers the request for this model: by reading it, or by saying why it cannot be read."""
        return cls.asked_for(asked)

    @classmethod  # noqa: B027 a kind may have nothing to check without the model
    def check(cls, asked: Asked) -> None:
        """Refuses what is wrong whatever the model: called before a model is loaded. Raises SinkscopeError."""

    def probe(self) -> tuple[Tensor, dict[str, Tensor]]:
        """One short input for the dry run, [1, ...], and what else the model takes with it, by keyword."""
        return probe(self.checkpoint), {}

    def several_probes(self) -> Tensor:
        """Short inputs that differ at every position: the search for W_V. Raises SinkscopeError if there are none."""
        return several_probes(self.checkpoint)

    @abstractmethod
    def read(self, positions: int) -> Reading:
        """The sequences. `positions`: how many the model's attention had in the dry run. Raises SinkscopeError."""

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        """Entries of summary.json that this kind alone has. `positions`: the run's table of that name."""
        return {}
