"""Keeps the batches of an unfinished scan on disk, one file per batch, so that a killed scan can resume. In a launch of
several processes the main process writes and reads them all.

A shard is written to a temporary name, brought to the disk, and renamed: after a kill or a power cut each shard is
complete or absent. It carries a SHA-256 of its tensors, its facts and its scan's key: one that is damaged, was renamed
or belongs to another scan is deleted, and its sequences are measured again.
The key beside the shards holds all that decides the numbers; a scan with another key is refused.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinkscope.checkpoints import Checkpoint
from sinkscope.checkpoints.private_doors import why_not_written
from sinkscope.checkpoints.weight_files import settings_sha256
from sinkscope.engine.collector import Part, Parts
from sinkscope.errors import SinkscopeError
from sinkscope.metrics.quantities import STRETCHED, QuantitySet
from sinkscope.metrics.spectra import FEWEST_SPECTRA, SPECTRA_CUBES
from sinkscope.runs import whole
from sinkscope.runs.folder import KEY, UNFINISHED, kept_json, measuring, need_file, sha256_of
from sinkscope.runs.schema.base import plain, to_json
from sinkscope.runs.schema.manifest import HASHES, Manifest

NAME = re.compile(r"([0-9]{3,})-([0-9]{8,})")
"""The name of a shard: its domain and the number of its first sequence."""

LOG = logging.getLogger(__name__)


MEASURING = ("capture", "checkpoints", "engine", "inputs", "metrics", "questions", "trigger", "wiring")
"""The rooms whose code decides what a batch measures."""


@dataclass(frozen=True)
class Shard:
    """One batch: sequences `start` to `start + count` of a domain.

    `size`: the batch size at that time. `fits`: the size that memory allowed; None where memory sufficed. `failed`: why
    metrics of others had failed by then, by name; their values may be missing.
    """

    domain: int
    start: int
    count: int
    size: int
    fits: int | None
    parts: Parts
    failed: dict[str, str] = field(default_factory=dict)


def with_weights(manifest: Manifest, checkpoint: Checkpoint) -> Manifest:
    """Returns the manifest with the weights' hash, for which it waits."""
    checkpoint.settle()
    model = manifest.model.model_copy(update={"weights_sha256": checkpoint.facts["weights_sha256"]})
    return manifest.model_copy(update={"model": model})


def resume_key(manifest: Manifest, checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything that must be equal for a scan to go on from another's shards. It waits for the weights' hash."""
    rule = manifest.request.spectra
    return with_weights(manifest, checkpoint).decides() | {
        "spectra": [SPECTRA_CUBES, FEWEST_SPECTRA] if rule is None else rule,
        "settings": settings_sha256(checkpoint.origin),
        "measuring_code": measuring_code(),
    }


def measuring_code(*rooms: str) -> str:
    """The first 16 digits of the SHA-256 over the source of every module that decides what a batch measures. `rooms`:
    those that decide it beside MEASURING."""
    return _code_of((*MEASURING, *rooms))


@cache
def _code_of(rooms: tuple[str, ...]) -> str:
    root, digest = Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(path for room in rooms for path in (root / room).rglob("*.py")):
        digest.update(f"{path.relative_to(root).as_posix()}:{sha256_of(path)}\n".encode())
    return digest.hexdigest()[:16]


class Unfinished:
    """What an unfinished measurement keeps in `folder`/shards: a key, which holds all that decides its numbers, and its
    batches. `WHAT`: what errors call the measurement."""

    WHAT: ClassVar[str] = "measurement"

    def __init__(self, folder: Path) -> None:
        self._folder = folder / UNFINISHED
        self._made: list[Path] = []

    @property
    def folder(self) -> Path:
        """The folder of the result, which holds what is kept."""
        return self._folder.parent

    def has_key(self) -> bool:
        """Whether something stands in the place of the key."""
        return os.path.lexists(self._folder / KEY)

    def empty(self) -> None:
        """Removes what is there, and makes the folder. Raises SinkscopeError where it cannot be written, or another
        process measures into it."""
        with _writing(self._folder):
            if self._folder.is_symlink():  # what it leads to need not be a scan's
                raise OSError(errno.ENOTDIR, "it is a link")
            self._made = [self._folder, *(path for path in self._folder.parents if not path.exists())]
            self._folder.mkdir(parents=True, exist_ok=True)
            with measuring(self.folder):
                for path in [path for path in self._folder.iterdir() if path.name != whole.LOCK]:
                    whole.remove(path)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Lets no other process measure into the folder until the block ends. Raises SinkscopeError where one does, or
        the folder cannot be written."""
        with contextlib.ExitStack() as stack:
            with _writing(self._folder):
                stack.enter_context(measuring(self.folder))
            yield

    def write_key(self, own: dict[str, Any]) -> None:
        """Writes the key. Raises SinkscopeError where it cannot be written."""
        with _writing(self._folder):
            _replace(self._folder / KEY, to_json(own).encode())

    def check_key(self, own: dict[str, Any]) -> None:
        """Raises SinkscopeError where what is kept has another key, or none that can be read."""
        kept = kept_json(self._folder / KEY)
        if not kept:
            raise SinkscopeError(f"{self._folder / KEY} is damaged: start anew with --force")
        if kept.get("schema_version") != own.get("schema_version"):
            raise SinkscopeError(
                f"{self.folder} holds an unfinished {self.WHAT} of sinkscope {kept.get('sinkscope')}, whose batches "
                "this sinkscope cannot read: give another --out, or --force to start anew"
            )
        different = [name for name in {**own, **kept} if own.get(name) != kept.get(name)]
        if different:
            raise SinkscopeError(
                f"{self.folder} holds an unfinished {self.WHAT} with another "
                f"{first_difference(own, kept, different)}; give another --out, or --force to start anew"
            )
        model = own.get("model")
        if isinstance(model, dict) and not any(model.get(name) for name in HASHES):
            raise SinkscopeError(
                f"{self.folder} holds an unfinished {self.WHAT}, and nothing tells whether it is of this model, whose "
                "weights cannot be hashed; give another --out, or --force to start anew"
            )


class Shards(Unfinished):
    """The shards of one scan."""

    WHAT = "scan"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._key = ""
        self._later: Callable[[], dict[str, Any]] | None = None

    @staticmethod
    def open(folder: str | Path, key: dict[str, Any], resume: bool) -> Shards:
        """Prepares the folder: keeps its shards with `resume`, else empties it.

        Raises SinkscopeError: the unfinished scan to resume has another key, or the folder cannot be written.
        """
        shards = Shards(Path(folder))
        if resume and shards.has_key():
            shards.check_key(shards._take(key))
            return shards
        shards = Shards.begin(folder, lambda: key)
        try:
            shards._settle()
        except BaseException:
            shards._discard_if_empty()
            raise
        return shards

    @staticmethod
    def begin(folder: str | Path, key: Callable[[], dict[str, Any]]) -> Shards:
        """Prepares an empty folder. The key is asked for and written with the first batch.

        Raises SinkscopeError: the folder cannot be written.
        """
        shards = Shards(Path(folder))
        shards._later = key
        shards.empty()
        return shards

    def _settle(self) -> None:
        """Writes the key where that is still to be done."""
        if self._later is not None:
            key, self._later = self._take(self._later()), None
            self.write_key(key)

    def _take(self, key: dict[str, Any]) -> dict[str, Any]:
        """Makes the shards those of a key, and returns it as plain data."""
        plain_key: dict[str, Any] = plain(key)
        self._key = hashlib.sha256(json.dumps(plain_key, sort_keys=True).encode()).hexdigest()
        return plain_key

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """As that of every measurement. Where the block ends before the first batch is done, no folder stays."""
        held = False
        try:
            with super().held():
                held = True
                yield
        finally:
            if held:
                self._discard_if_empty()

    def _discard_if_empty(self) -> None:
        """Removes the folders that this scan made where no batch was done."""
        if self._made and not any(self._folder.glob("*.safetensors")):
            (self._folder / KEY).unlink(missing_ok=True)
            for path in self._made:
                with contextlib.suppress(OSError):
                    path.rmdir()

    def write(self, shards: Iterable[Shard], quantities: QuantitySet) -> None:
        """Writes batches, which hold these quantities. Raises SinkscopeError where that fails (a full disk)."""
        self._settle()
        for shard in shards:
            self._write(shard, quantities)

    def _write(self, shard: Shard, quantities: QuantitySet) -> None:
        parts = [(site, part) for site, site_parts in shard.parts.items() for part in site_parts]
        tensors = {
            f"{number}.{name}": value.contiguous()
            for number, (_, part) in enumerate(parts)
            for name, value in part.values.items()
        }
        target = self._folder / f"{shard.domain:03}-{shard.start:08}.safetensors"
        temporary = target.with_suffix(".tmp")
        about = json.dumps({
            "key": self._key, "domain": shard.domain, "start": shard.start, "count": shard.count, "size": shard.size,
            "fits": shard.fits, "failed": shard.failed, "quantities": quantities.axes(),
            "parts": [
                {"site": site, "count": part.count, "causal": part.causal, "queries": part.queries, "keys": part.keys}
                for site, part in parts
            ],
        })  # fmt: skip
        try:
            temporary.unlink(missing_ok=True)  # what else may stand there, such as a pipe
            save_file(tensors, temporary, metadata={"about": about, "sha256": _digest(about, tensors)})
            whole.sync_file(temporary)
            temporary.replace(target)
            whole.sync_folder(self._folder)
        except Exception as error:  # a full disk, or anything that safetensors may raise
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            kept = any(self._folder.glob("*.safetensors"))
            more = "; --resume continues from there" if kept else ""
            raise SinkscopeError(f"cannot write {target}: {why_not_written(error)}{more}") from None

    def read(self, quantities: QuantitySet) -> Iterator[Shard]:
        """Yields all batches, in order. Deletes a batch that is damaged or repeats sequences of an earlier one.

        Raises SinkscopeError where a batch holds other quantities, or other metrics, cannot be deleted, or is no file.
        """
        domain = reached = 0
        for path in sorted(self._folder.glob("*.safetensors")):
            shard = _load(path, self._key, quantities.axes())
            if shard is not None and shard.domain != domain:
                domain, reached = shard.domain, 0
            if shard is None or shard.start < reached:
                self._discard(path)
                continue
            reached = shard.start + shard.count
            yield shard

    def _discard(self, path: Path) -> None:
        LOG.info("%s is damaged: its sequences are measured again", path)
        try:
            path.unlink()
        except OSError as error:
            raise SinkscopeError(f"{path} is damaged ({error.strerror}): start anew with --force") from None


def _digest(about: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over the facts of a shard and over name, type, shape and bytes of each tensor."""
    digest = hashlib.sha256(about.encode())
    for name, value in sorted(tensors.items()):
        digest.update(f"\n{name} {value.dtype} {list(value.shape)}\n".encode())
        digest.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _load(path: Path, key: str, axes: dict[str, list[str]]) -> Shard | None:
    """Reads a batch; None where the file is not what a scan of this `key` wrote under this name.

    Raises SinkscopeError where it is no file, and where it holds quantities of other `axes` (see QuantitySet.axes).
    """
    need_file(path)
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if _digest(metadata["about"], tensors) != metadata["sha256"]:
            return None
    except Exception:  # whatever safetensors says of it: its sequences are measured again
        return None
    about = json.loads(metadata["about"])
    named = NAME.fullmatch(path.stem)
    if about["key"] != key or named is None or [int(part) for part in named.groups()] != [
        about["domain"], about["start"]
    ]:  # fmt: skip
        return None
    _refuse_other_quantities(path, about["quantities"], axes)
    parts: Parts = {}
    for number, facts in enumerate(about["parts"]):
        values = {name: tensors[f"{number}.{name}"] for name in axes if f"{number}.{name}" in tensors}
        parts.setdefault(facts.pop("site"), []).append(Part(**facts, values=values))
    return Shard(about["domain"], about["start"], about["count"], about["size"], about["fits"], parts, about["failed"])


def _refuse_other_quantities(path: Path, theirs: dict[str, list[str]], own: dict[str, list[str]]) -> None:
    if theirs == own:
        return
    differ = sorted(theirs.keys() ^ own.keys())
    differ = [name for name in differ if {**theirs, **own}[name] != [*STRETCHED]] or differ  # those follow from others
    for name in theirs.keys() & own.keys():
        differ += sorted(f"{name}.{axis}" for axis in {*theirs[name]} ^ {*own[name]})
    shown = ", ".join(differ[:3]) + (", ..." if len(differ) > 3 else "") or "in another order"
    raise SinkscopeError(
        f"{path.parent.parent} holds an unfinished scan of other metrics ({shown}); declare the same ones, give "
        "another --out, or --force to start anew"
    )


def first_difference(own: Any, theirs: Any, names: list[str]) -> str:
    """Names the first entry in which two keys differ: `model.dtype (bfloat16 there, float32 now)`.

    An entry that one key leaves to the default comes last: the default may be what the other one asks for.
    """
    name = min(names, key=lambda entry: own.get(entry) is None or theirs.get(entry) is None)
    first, second = own.get(name), theirs.get(name)
    if isinstance(first, dict) and isinstance(second, dict):
        inner = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        if not inner:  # one leaves out what the other calls null: an earlier state of this version wrote it
            return name
        rest = first_difference(first, second, inner)
        return rest if name in ("request", "text") else f"{name}.{rest}"
    absent = "none" if name.endswith("_sha256") else "the default"
    told = [absent if value is None else str(value) for value in (second, first)]
    shown = [text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}" for text in told]
    return f"{name} ({shown[0]} there, {shown[1]} now)"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Raises SinkscopeError where the block cannot write into the folder."""
    try:
        yield
    except OSError as error:
        raise SinkscopeError(f"cannot write {folder}: {error.strerror or error}") from None


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.write_bytes(content)
        whole.sync_file(temporary)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    whole.sync_folder(path.parent)
