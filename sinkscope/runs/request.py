"""What a scan is asked to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.inputs import BOS_MODES, check_spec
from sinkscope.inputs.images import picture_paths
from sinkscope.inputs.sound import sound_paths
from sinkscope.inputs.vectors import TASKS

SEQ_LEN, NUM_SEQUENCES, DEFAULT_DATA = 256, 32, "prose"


@dataclass(frozen=True)
class Request:
    """What the user asks to be read. Raises SinkscopeError for what is wrong whatever the model.

    Attributes:
        data: a SPEC, a list of them, token ids, or None = "prose" (or the task a model brings).
        seq_len, num_sequences: None = 256 and 32 for text, all there is for token ids, the task's own for a task.
        bos: auto, always or never; several make a domain each.
        images, audio: a folder of pictures or of recordings, one for each sequence; prompt: the text beside each.
    """

    data: Any
    seq_len: int | None
    num_sequences: int | None
    bos: str | Sequence[str]
    seed: int
    images: str | Path | None = None
    prompt: str | None = None
    audio: str | Path | None = None

    def __post_init__(self) -> None:
        self._check_folders()
        if self.seq_len is not None and self.seq_len < 2:
            raise SinkscopeError(
                f"--seq-len {self.seq_len}: at least 2 tokens are needed (bos_mass starts at the second)"
            )
        if self.num_sequences is not None and self.num_sequences < 1:
            raise SinkscopeError(f"--num-sequences {self.num_sequences}: at least 1 is needed")
        for mode in self.bos_modes:
            if mode not in BOS_MODES:
                raise SinkscopeError(f"--bos {mode!r}: one of {', '.join(BOS_MODES)}")
        if not self.bos_modes or len(set(self.bos_modes)) < len(self.bos_modes):
            raise SinkscopeError("--bos names the same mode twice, or none")
        if self.seed < 0:
            raise SinkscopeError(f"--seed {self.seed}: 0 or more is needed")
        if len(set(self.specs)) < len(self.specs):
            raise SinkscopeError("--data names the same source twice")
        for spec in self.specs:
            if spec not in TASKS:
                check_spec(spec)

    def _check_folders(self) -> None:
        """What is wrong with a folder of pictures or recordings is said before the model is loaded."""
        if self.images is not None and self.audio is not None:
            raise SinkscopeError("--images and --audio: pictures are read, or recordings, not both")
        if self.data is not None and self.images is not None:
            raise SinkscopeError("--images and --data: pictures are read, or data, not both")
        if self.data is not None and self.audio is not None:
            raise SinkscopeError("--audio and --data: recordings are read, or data, not both")
        if self.images is not None:
            picture_paths(Path(self.images))
        elif self.audio is not None:
            sound_paths(Path(self.audio))
        elif self.prompt is not None:
            raise SinkscopeError("--prompt is the text beside --images or --audio")

    @property
    def bos_modes(self) -> list[str]:
        return [self.bos] if isinstance(self.bos, str) else list(self.bos)

    @property
    def specs(self) -> list[str]:
        """The SPECs that `data` names; none where it is token ids."""
        if self.data is None:
            return [DEFAULT_DATA]
        specs = [self.data] if isinstance(self.data, str) else self.data
        if not isinstance(specs, Sequence) or not all(isinstance(spec, str) for spec in specs):
            return []
        return list(specs)
