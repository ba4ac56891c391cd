"""Keeps what long sequences leave in a temporary file, where it is more than a bounded part of memory."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

IN_MEMORY = 2**26
"""The bytes of one batch of sequences that stay in memory."""

LEFT_FREE = 2**30
"""The bytes that the disk keeps for others."""


class _File:
    """A temporary file without a name, which is gone with this object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="sinkscope-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)

    def write(self, numbers: memoryview) -> int:
        """Writes at the end of the file, and returns where. Raises OSError where the disk is full."""
        start = self._file.seek(0, os.SEEK_END)
        while numbers:
            numbers = numbers[self._file.write(numbers) :]
        return start

    def read(self, start: int, numbers: memoryview) -> None:
        """Fills `numbers` with what is in the file from `start` on. Raises OSError where it cannot be read."""
        self._file.seek(start)
        while numbers:
            count = self._file.readinto(numbers)
            if not count:
                raise OSError("the temporary file of a watched sequence is shorter than what was written")
            numbers = numbers[count:]


@dataclass(frozen=True, eq=False)
class Shelved:
    """A tensor whose numbers are in a file, from the byte `start` on."""

    file: _File
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self) -> Tensor:
        """The tensor, in memory again. Raises OSError where the file cannot be read."""
        held = torch.empty(self.shape, dtype=self.dtype)
        self.file.read(self.start, _bytes(held))
        return held


class Shelf:
    """The tensors of one batch of sequences: the first ones in memory, the later ones in a file without a name, which
    is gone with the last of them. What is on an accelerator stays there, and so does all where the disk is full."""

    def __init__(self) -> None:
        self._held = 0
        self._file: _File | None = None
        self._full = False

    def put(self, tensor: Tensor) -> Tensor | Shelved:
        """The tensor where it is from now on. Nobody may write into it any more."""
        on_cpu = type(tensor) is Tensor and tensor.device.type == "cpu"
        if self._full or not on_cpu or self._held + tensor.nbytes <= IN_MEMORY:
            self._held += tensor.nbytes
            return tensor
        try:
            return self._write(tensor.detach().resolve_conj().resolve_neg().contiguous())
        except OSError:
            self._full = True
            return tensor

    def _write(self, tensor: Tensor) -> Shelved:
        self._file = self._file or _File()
        if shutil.disk_usage(tempfile.gettempdir()).free < LEFT_FREE + tensor.nbytes:
            raise OSError(errno.ENOSPC, "little room is left")
        return Shelved(self._file, self._file.write(_bytes(tensor)), tensor.shape, tensor.dtype)


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
