"""What a measurement of arms leaves in its folder: tables, figures and one JSON file, written all or nothing."""

from __future__ import annotations

import datetime
import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Self

import pandas as pd

from sinkscope.runs.defaults import VERSION
from sinkscope.runs.folder import FolderKind, sha256_of_files
from sinkscope.runs.schema.base import plain, to_json
from sinkscope.runs.whole import read_file


def result_folder(name: str, record: str, tables: tuple[str, ...]) -> FolderKind:
    """The kind of folder that holds `record`.json, the figure of that name, and these tables."""

    def state(folder: Path) -> bool | None:
        try:
            facts = json.loads(read_file(folder / f"{record}.json"))
        except (OSError, ValueError, RecursionError):
            return None
        return True if isinstance(facts, dict) and {"schema_version", "sinkscope", "table"} <= facts.keys() else None

    figures = {f"{record}.{form}" for form in ("json", "png", "svg", "pdf")}
    return FolderKind(name, frozenset({*figures, *(f"{table}.csv" for table in tables)}), state)


class Result(ABC):
    """A result of several tables, of which the first also stands in its JSON file.

    Attributes:
        facts: what was measured: model, run, data and settings.
        words: the result in sentences.
    """

    FOLDER: ClassVar[FolderKind]
    RECORD: ClassVar[str]
    """Name of the JSON file, without its ending."""

    facts: dict[str, Any]
    words: list[str]
    warnings: list[str]

    @abstractmethod
    def tables(self) -> dict[str, pd.DataFrame]:
        """The tables by name; the first is the one of the JSON file."""

    @abstractmethod
    def conventions(self) -> dict[str, str]:
        """What the columns are."""

    def choices(self) -> dict[str, Any]:
        """What stands behind the table in the JSON file."""
        return {}

    def as_dict(self) -> dict[str, Any]:
        """The content of the JSON file: everything but the numbers of each sequence."""
        return {
            "schema_version": 1,
            "sinkscope": VERSION,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            **self.facts,
            "table": [plain(row) for row in next(iter(self.tables().values())).to_dict("records")],
            **self.choices(),
            "in_words": self.words,
            "warnings": self.warnings,
            "conventions": self.conventions(),
        }

    def save(
        self, folder: str | Path, force: bool = False, draw: Callable[[Self], dict[str, bytes]] | None = None,
        resume: bool = False,
    ) -> list[Path]:  # fmt: skip
        """Writes the tables as CSV, the JSON file and the figures of `draw`, by file name: all or nothing.

        `resume`: the folder holds this measurement's own finished batches, which then go. Raises SinkscopeError as
        `Run.save` does.
        """
        figures = {} if draw is None else draw(self)

        def fill(work: Path) -> None:
            for name, table in self.tables().items():
                table.to_csv(work / f"{name}.csv", index=False, float_format="%.9g", lineterminator="\n")
            for name, content in figures.items():
                (work / name).write_bytes(content)
            facts = self.as_dict() | {"files": sha256_of_files(work)}
            (work / f"{self.RECORD}.json").write_text(to_json(facts), encoding="utf-8")

        return self.FOLDER.write(folder, force, fill, resume)
