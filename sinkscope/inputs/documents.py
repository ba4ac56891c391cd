"""Reads the documents that a SPEC names (built-in corpora, files, Hugging Face datasets) as text or token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from sinkscope.errors import SinkscopeError, all_lines, did_you_mean, first_line
from sinkscope.inputs.rules import check_characters
from sinkscope.runs.passages import LeftOut, NothingLeft, Passage, ids_fingerprint, text_fingerprint

BUILT_IN = ("prose", "code", "multilingual")
SYNTHETIC = ("random", "repeated")
FIELDS = ("text", "input_ids", "messages")
"""The fields that are read where the SPEC names none, in this order."""
SUFFIXES = (".txt", ".jsonl", ".parquet")
NUL = "\0"
NAMES_SHOWN = 10
"""Most names of columns that an error lists."""
STREAM_LIMIT = 20_000
"""Most rows read of a file: a scan needs some dozens of documents. Of a Hugging Face dataset at most 2,000 are read."""


@dataclass(frozen=True)
class Document:
    """One text, the token ids of one sequence taken as they are, or a conversation: messages with role and content."""

    name: str
    text: str | None = None
    ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None

    @property
    def passage(self) -> Passage:
        """All of the document."""
        if self.messages is not None:
            return Passage(text_fingerprint(json.dumps(self.messages)))
        return Passage(text_fingerprint(self.text or "") if self.ids is None else ids_fingerprint(self.ids))


@dataclass(frozen=True)
class DataSource:
    """The documents a SPEC names. `running`: one long text, read in consecutive windows, except those `left_out`."""

    spec: str
    documents: list[Document]
    running: bool = False
    left_out: LeftOut = field(default_factory=LeftOut)

    def leaving_out(self, left_out: LeftOut) -> DataSource:
        """Returns the source without the documents (or windows) to leave out. Raises NothingLeft if none remains."""
        if self.running or not left_out:
            return replace(self, left_out=left_out)
        kept = [document for document in self.documents if not left_out.holds(document.name, document.passage)]
        if not kept:
            raise NothingLeft(f"data {self.spec!r}: all {len(self.documents)} documents are left out; give other data")
        return replace(self, documents=kept)


@dataclass(frozen=True)
class Texts:
    """Texts handed over in Python, each a document."""

    texts: tuple[str, ...]
    NAME = "texts"

    def source(self) -> DataSource:
        """The texts as documents, by number. Raises SinkscopeError where all are empty."""
        if not any(text.strip() for text in self.texts):
            raise SinkscopeError("data: the texts are empty")
        named = [Document(f"text {number}", text=text) for number, text in enumerate(self.texts)]
        for document in named:
            check_characters(document.text or "", document.name)
        return DataSource(self.NAME, named)


def as_texts(data: Any) -> Texts | None:
    """The strings of a list as texts, where one holds a space or a line break and none is a SPEC; None otherwise."""
    if not isinstance(data, list | tuple) or not data or not all(isinstance(text, str) for text in data):
        return None
    plain = not any(_is_spec(text) for text in data) and any(len(text.split()) > 1 for text in data)
    return Texts(tuple(data)) if plain else None


def _is_spec(text: str) -> bool:
    file = text.partition("#")[0].lower().endswith(SUFFIXES)
    return text in (*BUILT_IN, *SYNTHETIC) or text.startswith("hf:") or file


def read_source(spec: str) -> DataSource:
    """Reads a SPEC: a built-in name, FILE.txt, FILE.jsonl[#FIELD], FILE.parquet[#FIELD], hf:NAME[:CONFIG]/SPLIT#FIELD.

    Raises SinkscopeError in one line: unknown name, absent, empty, binary or damaged file, unknown field or dataset.
    """
    if spec in BUILT_IN:
        return DataSource(spec, list(_built_in(spec)))
    if spec.startswith("hf:"):
        return DataSource(spec, list(_hub_dataset(spec)))
    check_spec(spec)
    name, _, field = spec.partition("#")
    path = Path(name)
    if path.suffix.lower() == ".txt":
        return DataSource(spec, [Document(path.name, text=_text(path))], running=True)
    rows = _json_rows(path) if path.suffix.lower() == ".jsonl" else _parquet_rows(path, field)
    documents = list(_documents(islice(rows, STREAM_LIMIT), field))
    if not documents:
        raise SinkscopeError(f"{name} holds neither text nor token ids")
    return DataSource(spec, documents)


def origin(spec: str) -> str:
    """What a SPEC reads from, whichever field: a file's absolute path; the name of a corpus or a dataset's split."""
    name = spec.partition("#")[0]
    return name if name.startswith("hf:") or Path(name).suffix.lower() not in SUFFIXES else str(Path(name).resolve())


def check_spec(spec: str) -> None:
    """Raises SinkscopeError for a SPEC that no model can read; called before a model is loaded."""
    if spec in (*BUILT_IN, *SYNTHETIC):
        return
    if spec.startswith("hf:"):
        _hub_names(spec)
        return
    name, _, field = spec.partition("#")
    path = Path(name)
    if path.suffix.lower() not in SUFFIXES:
        specs = (*BUILT_IN, *SYNTHETIC)
        found = ", a folder" if path.is_dir() else ", a file with another ending" if path.exists() else ""
        found = found if name else ""  # Python takes an empty path for the working folder
        raise SinkscopeError(
            f"unknown data {spec!r}{found}: give one of {', '.join(specs)}, a "
            f"{', '.join(SUFFIXES)} file, or hf:NAME[:CONFIG]/SPLIT#FIELD{did_you_mean(spec, specs)}"
        )
    if not path.is_file():
        raise SinkscopeError(f"{name} is not a file" if path.exists() else f"no such data file: {name}")
    try:
        with path.open("rb") as file:
            empty = not file.read(1)  # the size of a file of the system is 0, whatever it holds
    except OSError as error:
        raise SinkscopeError(f"cannot read {name}: {error.strerror}") from None
    if empty:
        raise SinkscopeError(f"{name} is empty: give a file with text")
    if field and path.suffix.lower() == ".txt":
        raise SinkscopeError(f"{name} is plain text and has no field {field!r}")


def check_regular(path: Path, option: str) -> None:
    """Raises SinkscopeError for what is no regular file: reading a pipe would wait for ever."""
    if not path.is_file():
        raise SinkscopeError(f"{option}: {path} is not a regular file")


def listed(folder: Path, option: str, suffixes: tuple[str, ...]) -> list[Path]:
    """The files of a folder with these endings, by name. Raises SinkscopeError where there are none."""
    if not folder.is_dir():
        raise SinkscopeError(f"{option} {folder}: no such folder")
    paths = sorted(path for path in folder.iterdir() if path.suffix.lower() in suffixes)
    if not paths:
        raise SinkscopeError(f"{option} {folder}: no {' or '.join(suffixes[:2])} in it")
    return paths


def from_checkpoint(family: Any, origin: dict[str, Any], option: str, what: str) -> Any:
    """The processor that a checkpoint brings. `origin`: arguments of from_pretrained.

    Raises SinkscopeError where it brings none that can be used.
    """
    try:
        return family.from_pretrained(**origin)
    except Exception as error:  # absent, damaged, missing package: transformers' text says which
        raise SinkscopeError(f"{option}: no usable {what}: {all_lines(error)}") from error


def _built_in(name: str) -> Iterator[Document]:
    folder = files("sinkscope") / "data" / name
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        yield Document(entry.name.removesuffix(".txt"), text=entry.read_text(encoding="utf-8"))


def _text(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise SinkscopeError(
            f"{path} is not UTF-8 text (byte {error.start}): convert it to UTF-8, or name another file"
        ) from None
    except OSError as error:
        raise SinkscopeError(f"cannot read {path}: {error.strerror}") from None
    if NUL in text:
        raise SinkscopeError(
            f"{path} holds a NUL character (at {text.index(NUL)}), as binary files and UTF-16 do: convert it to UTF-8, "
            "or name another file"
        )
    if not text.strip():
        raise SinkscopeError(f"{path} is empty: give a file with text")
    return text


def _json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            yield f"{path.name}:{number}", json.loads(line)
        except ValueError:
            raise SinkscopeError(f"{path} line {number} is not JSON: one object a line is expected") from None
        except RecursionError:
            raise SinkscopeError(f"{path} line {number}: its values are nested too deeply") from None


def _parquet_rows(path: Path, field: str) -> Iterator[tuple[str, Any]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        wanted = [name for name in ((field,) if field else FIELDS) if name in names][:1]
        if not wanted:
            raise SinkscopeError(_no_field(path.name, field, names))
        number = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            for row in batch.to_pylist():
                number += 1
                yield f"{path.name}:{number}", row
    except SinkscopeError:
        raise
    except Exception as error:  # damage also ends in ValueError, UnicodeDecodeError or OverflowError
        raise SinkscopeError(f"cannot read {path} as Parquet: {first_line(error)}") from None


def _documents(rows: Iterable[tuple[str, Any]], field: str) -> Iterator[Document]:
    for place, row in rows:
        if not isinstance(row, dict):
            raise SinkscopeError(f"{place}: an object with `text` or `input_ids` is expected, not {type(row).__name__}")
        chosen = field or next((key for key in FIELDS if key in row), "")
        if chosen not in row:
            raise SinkscopeError(_no_field(place, field, row))
        value = row[chosen]
        if value is None:
            continue
        if isinstance(value, str):
            if value.strip():
                check_characters(value, f"{place}: field {chosen!r}")
                yield Document(place, text=value)
        elif (
            isinstance(value, list) and (value or chosen == "messages") and all(isinstance(row, dict) for row in value)
        ):
            yield Document(place, messages=messages(value, f"{place}: field {chosen!r}"))
        elif isinstance(value, list) and all(type(item) is int for item in value):
            yield Document(place, ids=value)
        else:
            raise SinkscopeError(
                f"{place}: field {chosen!r} is neither text, nor a list of token ids, nor a list of messages"
            )


def _no_field(place: str, field: str, names: Iterable[str]) -> str:
    wanted = f"no column {field!r}" if field else "neither `text` nor `input_ids` nor `messages`"
    columns = sorted(map(str, names))
    more = f" and {len(columns) - NAMES_SHOWN:,} more" if len(columns) > NAMES_SHOWN else ""
    shown = ", ".join(columns[:NAMES_SHOWN]) or "none"
    return f"{place}: {wanted}; it has {shown}{more} (choose one with FILE#COLUMN)"


def _hub_dataset(spec: str) -> Iterator[Document]:
    """Streams hf:NAME[:CONFIG]/SPLIT#FIELD: fetches only the rows that are read."""
    name, config, split, field = _hub_names(spec)
    try:
        from datasets import load_dataset
    except ImportError:
        raise SinkscopeError("hf: data need the `datasets` package: pip install 'sinkscope[datasets]'") from None
    try:
        rows = load_dataset(name, config or None, split=split, streaming=True)
        numbered = ((f"{name}/{split}:{number}", row) for number, row in enumerate(islice(rows, 2_000)))
        yield from _documents(numbered, field)
    except SinkscopeError:
        raise
    except Exception as error:  # the library raises many kinds: unknown dataset, config, split, network
        raise SinkscopeError(f"cannot read dataset {name!r}: {first_line(error)}") from None


def _hub_names(spec: str) -> tuple[str, str, str, str]:
    """Returns (dataset, config, split, field) of hf:NAME[:CONFIG]/SPLIT#FIELD."""
    path, _, field = spec.removeprefix("hf:").partition("#")
    dataset, slash, split = path.rpartition("/")
    if not slash or not dataset or not split:
        raise SinkscopeError(
            f"cannot read {spec!r}: write hf:NAME[:CONFIG]/SPLIT#FIELD, e.g. hf:allenai/c4:en/train#text"
        )
    name, _, config = dataset.partition(":")
    return name, config, split, field


ROLES = ("system", "developer", "user", "assistant", "tool")


def messages(rows: list[dict[str, Any]], place: str) -> list[dict[str, str]]:
    """Returns role and text of each message. A content may be a list of parts, as vision-language models have it, all
    of them text. `place` names the conversation in errors.

    Raises SinkscopeError where there is no message, for a role that is unknown and for a content that is no text.
    """
    if not rows:
        raise SinkscopeError(f"{place} holds no message")
    return [_message(row, f"{place}, message {number}") for number, row in enumerate(rows)]


def _message(row: dict[str, Any], place: str) -> dict[str, str]:
    role, content = row.get("role"), row.get("content")
    if role not in ROLES:
        given = "no role" if role is None else f"role {role!r}"
        raise SinkscopeError(f"{place} has {given}: give one of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not content.strip():
        found = "is empty" if isinstance(content, str) else "is no text"
        raise SinkscopeError(f"{place} ({role}): its `content` {found}")
    check_characters(content, place)
    return {"role": role, "content": content}
