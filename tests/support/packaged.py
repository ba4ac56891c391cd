"""Puts a package into a folder as pip leaves it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def package(folder: Path, name: str, group: str, entries: Mapping[str, str], **modules: str) -> None:
    """A distribution of this name, with `entries` of one group of entry points (name: object), and modules by name
    (their text). The folder is made where it is absent; who wants it found puts it on Python's path."""
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]", *(f"{entry} = {place}" for entry, place in entries.items())]
    (facts / "entry_points.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
