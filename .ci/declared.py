"""Prints what pyproject.toml declares under a name: the requirement of a dependency, or those of an extra, one a line.

Usage: declared.py NAME
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def declared(text: str, name: str) -> list[str]:
    """The requirements of a pyproject.toml's text. Raises KeyError where it has no such name."""
    project = tomllib.loads(text)["project"]
    if name in project["optional-dependencies"]:
        return list(project["optional-dependencies"][name])
    found = [line for line in project["dependencies"] if re.match(r"[\w.-]+", line)[0] == name]  # type: ignore[index]
    if not found:
        raise KeyError(name)
    return found


if __name__ == "__main__":
    print("\n".join(declared((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"), sys.argv[1])))
