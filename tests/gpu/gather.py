"""Gathers what a GPU machine without network lacks, into tests/gpu/wheels; run it where there is a network.

    python tests/gpu/gather.py

The machine is taken to have Python 3.12, torch, triton and transformers with what these require, and nothing else.
`pip download` fetches the wheels; git ignores the folder. `battery.py` unpacks them there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from email.parser import Parser
from pathlib import Path

WHEELS = Path(__file__).parent / "wheels"
LIMIT = 50 * 2**20
"""Bytes that all wheels together may have."""
WANTED = (
    *("accelerate", "psutil", "jaxtyping", "wadler-lindig"),
    *("pytest", "pluggy", "iniconfig", "pygments", "hypothesis", "sortedcontainers", "attrs"),
)
"""What the battery imports, with all that it requires. pandas, scipy and pyarrow are too large together: the battery
reads what a scan collects, and makes no tables of it."""
THERE = frozenset({
    "torch", "triton", "transformers", "filelock", "typing-extensions", "setuptools", "sympy", "networkx", "jinja2",
    "fsspec", "huggingface-hub", "numpy", "packaging", "pyyaml", "regex", "tokenizers", "typer", "safetensors", "tqdm",
})  # fmt: skip
"""What is on the machine: three distributions and what they require."""
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_28_x86_64")


def normal(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def command(names: Iterable[str], folder: Path) -> list[str]:
    """The call of pip that fetches the wheels for the machine, whatever runs here."""
    platforms = [word for each in PLATFORMS for word in ("--platform", each)]
    return [
        sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp",
        "--python-version", "3.12", *platforms, "--dest", str(folder), *names,
    ]  # fmt: skip


def requirements(wheel: Path) -> set[str]:
    """Names of the distributions that a wheel requires without any extra, on Linux with Python 3.12."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = Parser().parsestr(archive.read(name).decode()).get_all("Requires-Dist") or []
    needed = set()
    for line in lines:
        requirement, _, marker = line.partition(";")
        if not re.search(r"extra|win32|Windows|python_version *<|python_full_version *<|PyPy", marker):
            needed.add(normal(re.split(r"[\s\[<>=!~(]", requirement.strip())[0]))
    return needed


def missing(folder: Path) -> set[str]:
    """What the wheels of the folder require that is neither among them nor on the machine."""
    wheels = list(folder.glob("*.whl"))
    there = {normal(wheel.name.partition("-")[0]) for wheel in wheels} | THERE
    return {name for wheel in wheels for name in requirements(wheel)} - there


def main() -> None:
    WHEELS.mkdir(exist_ok=True)
    for old in WHEELS.glob("*.whl"):
        old.unlink()
    subprocess.run(command(WANTED, WHEELS), check=True)
    lacking, size = missing(WHEELS), sum(wheel.stat().st_size for wheel in WHEELS.glob("*.whl"))
    if lacking:
        sys.exit(f"the wheels also require {', '.join(sorted(lacking))}: name them in WANTED")
    if size > LIMIT:
        sys.exit(f"the wheels have {size / 2**20:.1f} MiB: more than {LIMIT // 2**20}")
    print(f"{len(WANTED)} wheels, {size / 2**20:.1f} MiB, in {WHEELS}")


if __name__ == "__main__":
    main()
