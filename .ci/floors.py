"""Prints the lowest declared version of every dependency of pyproject.toml, as constraints for pip.

Usage: floors.py [NAME==VERSION ...]; a version given here replaces the declared one.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

REQUIREMENT = re.compile(r"([\w.-]+)[^<>=]*(?:>=|==)([\w.]+)")


def floors(text: str) -> dict[str, str]:
    """Distribution name to lowest version, over the dependencies and all extras of a pyproject.toml's text."""
    project = tomllib.loads(text)["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    found = (REQUIREMENT.match(line) for lines in lists for line in lines)
    return {match[1].lower().replace("_", "-"): match[2] for match in found if match}


def main() -> None:
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    lowest = floors(pyproject.read_text("utf-8")) | dict(word.split("==") for word in sys.argv[1:])
    for name, version in sorted(lowest.items()):
        print(f"{name}=={version}")


if __name__ == "__main__":
    main()
