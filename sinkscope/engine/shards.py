"""What an unfinished scan has measured, on disk: one file a batch, so that a killed scan goes on where it was. In a
launch of several processes the main one writes and reads them all.

A shard is written to a temporary name and renamed: after a kill at any moment each shard is whole or not there.
Beside them lies the key, all that decides the numbers; a scan with another key is refused.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sinkscope.engine.collector import Part, Parts
from sinkscope.errors import SinkscopeError
from sinkscope.runs.folder import UNFINISHED
from sinkscope.runs.strict_json import plain, to_json

KEY = "key.json"


@dataclass(frozen=True)
class Shard:
    """One batch: sequences `start` to `start + count` of a domain.

    `size`: sequences a batch at that time; `fits`: the size that memory allowed, None where none was refused.
    """

    domain: int
    start: int
    count: int
    size: int
    fits: int | None
    parts: Parts


class Shards:
    """The shards of one scan, in `folder`/shards."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / UNFINISHED
        self._made: list[Path] = []

    @property
    def folder(self) -> Path:
        """The run folder they lie in."""
        return self._folder.parent

    @staticmethod
    def open(folder: str | Path, key: dict[str, Any], resume: bool) -> Shards:
        """Makes the folder ready: kept where `resume` asks for it and the key is the same, else emptied.

        Raises SinkscopeError: the unfinished scan there has another key, or the folder cannot be written.
        """
        shards = Shards(Path(folder))
        own = plain(key)
        try:
            if resume and (shards._folder / KEY).exists():
                shards._check(own)
                return shards
            shutil.rmtree(shards._folder, ignore_errors=True)
            shards._made = [path for path in (shards._folder, *shards._folder.parents) if not path.exists()]
            shards._folder.mkdir(parents=True)
            _replace(shards._folder / KEY, to_json(own).encode())
        except OSError as error:
            raise SinkscopeError(f"cannot write {shards._folder}: {error.strerror or error}") from None
        return shards

    def _check(self, own: dict[str, Any]) -> None:
        try:
            theirs = json.loads((self._folder / KEY).read_text("utf-8"))
        except (OSError, ValueError):
            raise SinkscopeError(f"{self._folder} is damaged: start anew with --force") from None
        if theirs.get("schema_version") != own["schema_version"]:
            raise SinkscopeError(
                f"{self.folder} holds an unfinished scan of sinkscope {theirs.get('sinkscope')}, whose batches this "
                "sinkscope cannot read: give another --out, or --force to start anew"
            )
        different = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if different:
            raise SinkscopeError(
                f"{self.folder} holds an unfinished scan with another {_first_difference(own, theirs, different)}; "
                "give another --out, or --force to start anew"
            )

    def discard_if_empty(self) -> None:
        """Leaves no trace of a scan that failed before its first batch was done."""
        if self._made and not any(self._folder.glob("*.safetensors")):
            (self._folder / KEY).unlink(missing_ok=True)
            for path in self._made:
                with contextlib.suppress(OSError):
                    path.rmdir()

    def write(self, shards: Iterable[Shard]) -> None:
        """Keeps batches. Raises SinkscopeError where the disk is full."""
        for shard in shards:
            self._write(shard)

    def _write(self, shard: Shard) -> None:
        tensors: dict[str, Tensor] = {}
        rest: list[dict[str, Any]] = []
        for site, own in shard.parts.items():
            for part in own:
                values = {field.name: getattr(part, field.name) for field in fields(Part)}
                held = {name: value for name, value in values.items() if isinstance(value, Tensor)}
                tensors |= {f"{len(rest)}.{name}": value.contiguous() for name, value in held.items()}
                rest.append({"site": site} | {name: value for name, value in values.items() if name not in held})
        target = self._folder / f"{shard.domain:03}-{shard.start:08}.safetensors"
        temporary = target.with_suffix(".tmp")
        about = {"count": shard.count, "size": shard.size, "fits": shard.fits, "parts": rest}
        try:
            save_file(tensors, temporary, metadata={"about": json.dumps(about)})
            temporary.replace(target)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            reason = getattr(error, "strerror", None) or error
            raise SinkscopeError(f"cannot write {target}: {reason}; --resume goes on from there") from None

    def read(self) -> Iterator[Shard]:
        """All batches, in order. One that is damaged, or holds sequences of one before it, is dropped."""
        domain = reached = 0
        for path in sorted(self._folder.glob("*-*.safetensors")):
            number, start = (int(part) for part in path.stem.split("-"))
            if number != domain:
                domain, reached = number, 0
            shard = _load(path, number, start) if start >= reached else None
            if shard is None:
                path.unlink()
                continue
            reached = start + shard.count
            yield shard


def _load(path: Path, domain: int, start: int) -> Shard | None:
    """None where the file is damaged: a power cut can leave a renamed file without its content."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            parts: Parts = {}
            names = set(file.keys())
            for number, rest in enumerate(about["parts"]):
                own = [field.name for field in fields(Part) if f"{number}.{field.name}" in names]
                held = {name: file.get_tensor(f"{number}.{name}") for name in own}
                site = rest.pop("site")
                parts.setdefault(site, []).append(Part(**rest, **held))
    except (OSError, ValueError, KeyError, TypeError, SafetensorError):
        return None
    return Shard(domain, start, about["count"], about["size"], about["fits"], parts)


def _first_difference(own: Any, theirs: Any, names: list[str]) -> str:
    """`model.dtype (bfloat16 there, float32 now)`: the first place where two keys differ."""
    name = names[0]
    first, second = own.get(name), theirs.get(name)
    if isinstance(first, dict) and isinstance(second, dict):
        inner = [key for key in {**first, **second} if first.get(key) != second.get(key)]
        rest = _first_difference(first, second, inner)
        return rest if name == "request" else f"{name}.{rest}"
    shown = [text if len(text) <= 40 else "..." for text in (str(second), str(first))]
    return f"{name} ({shown[0]} there, {shown[1]} now)"


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(content)
    temporary.replace(path)
