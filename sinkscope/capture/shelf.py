"""Keeps what long sequences leave in a temporary file, where it is more than a bounded part of memory."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import tempfile
import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError

IN_MEMORY = 2**28
"""The bytes of one batch of sequences that stay in memory."""

LEFT_FREE = 2**30
"""The bytes that the disk keeps for others."""

_PRIVATE = {} if not hasattr(mmap, "MAP_ANONYMOUS") else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
"""Memory that a forked process does not share, where a system has such."""


class _File:
    """A temporary file without a name, which is gone with this object."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(prefix="sinkscope-", buffering=0)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._process = os.getpid()

    def write(self, numbers: memoryview) -> int:
        """Writes at the end of the file, and returns where. Raises OSError where the disk is full, and in a forked
        process, which shares the file with this one."""
        if os.getpid() != self._process:
            raise OSError(errno.EACCES, "another process writes this file")
        start = self._file.seek(0, os.SEEK_END)
        while numbers:
            numbers = numbers[self._file.write(numbers) :]
        return start

    def read(self, start: int, numbers: memoryview) -> None:
        """Fills `numbers` with what is in the file from `start` on. Raises OSError where it cannot be read."""
        while numbers:
            count = self._read_some(start, numbers)
            if not count:
                raise OSError("the temporary file of a watched sequence is shorter than what was written")
            start, numbers = start + count, numbers[count:]

    def _read_some(self, start: int, numbers: memoryview) -> int:
        if hasattr(os, "preadv"):  # leaves the place alone at which another process writes
            return os.preadv(self._file.fileno(), [numbers], start)
        self._file.seek(start)
        return self._file.readinto(numbers)


@dataclass(frozen=True, eq=False)
class InFile:
    """A tensor whose numbers are in a file, from the byte `start` on."""

    file: _File
    start: int
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, start: int, stop: int) -> Tensor:
        """Its rows from `start` to before `stop`, in memory again. Raises SinkscopeError where the file cannot be
        read."""
        held = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        row = held.nbytes // max(1, stop - start)
        try:
            self.file.read(self.start + start * row, _bytes(held))
        except OSError as error:
            raise SinkscopeError(
                f"the temporary file of a watched sequence cannot be read ({error.strerror or error}): it is in "
                f"{tempfile.gettempdir()}, and TMPDIR names another folder"
            ) from None
        return held


@dataclass(frozen=True, eq=False)
class InMemory:
    """A tensor whose numbers are in a piece of memory of their own, outside of the heap. Where torch holds it, the
    little that torch keeps of it beside is in the heap."""

    memory: mmap.mmap | bytearray
    shape: torch.Size
    dtype: torch.dtype

    def tensor(self, start: int, stop: int) -> Tensor:
        """Its rows from `start` to before `stop`, which show that memory."""
        return torch.frombuffer(self.memory, dtype=self.dtype).view(self.shape)[start:stop]


Shelved = InFile | InMemory


class Shelf:
    """The tensors of one batch of sequences: the first ones in memory, the later ones in a file without a name, which
    is gone with the last of them. What is on an accelerator stays there, and so does all where the disk is full."""

    def __init__(self) -> None:
        self._held = 0
        self._file: _File | None = None
        self._full = False

    def put(self, tensor: Tensor) -> Tensor | InFile:
        """A large tensor where it is from now on. Nobody may write into it any more."""
        on_cpu = type(tensor) is Tensor and tensor.device.type == "cpu"
        return (self._written(tensor) if on_cpu else None) or tensor

    def copy(self, tensor: Tensor) -> Shelved:
        """A copy of a tensor on the CPU that is not empty."""
        written = self._written(tensor)
        if written is not None:
            return written
        numbers = _bytes(tensor.contiguous())
        try:
            memory: mmap.mmap | bytearray = mmap.mmap(-1, tensor.nbytes, **_PRIVATE)
        except OSError:  # a process may have so many pieces of memory, and no more
            memory = bytearray(numbers)
        else:
            memory[:] = numbers
        return InMemory(memory, tensor.shape, tensor.dtype)

    def _written(self, tensor: Tensor) -> InFile | None:
        """The tensor in the file; None where there is room in memory, or none on the disk."""
        if self._full or self._held + tensor.nbytes <= IN_MEMORY:
            self._held += tensor.nbytes
            return None
        try:
            self._file = self._file or _File()
            if shutil.disk_usage(tempfile.gettempdir()).free < LEFT_FREE + tensor.nbytes:
                raise OSError(errno.ENOSPC, "little room is left")
            plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
            return InFile(self._file, self._file.write(_bytes(plain)), plain.shape, plain.dtype)
        except OSError:
            self._full = True
            return None


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return memoryview(tensor.view(-1).view(torch.uint8).numpy().data)
