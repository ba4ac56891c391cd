"""Seconds that commands on saved runs take to start, as multiples of the time of importing pandas.

    python tests/benchmarks/benchmark_start.py RUN

Each command and the import run five times in processes of their own, in turn; the medians are compared. What touches no
model should start in less than 1.5 times the import.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = 5


def seconds(words: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, capture_output=True)
    return time.perf_counter() - began


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "import pandas": ["-c", "import pandas"],
            "metrics": ["metrics", "bos_mass"],
            "schema": ["schema", "heads"],
            "examples": ["examples"],
            "baseline": ["baseline", run, "-o", f"{folder}/b.json"],
            "compare": ["compare", run, run],
            "export": ["export", run, "--format", "latex"],
            "show": ["show", run],
            "report": ["report", run, "-o", f"{folder}/r.html"],
            "plot": ["plot", run, "--figure", "heatmap", "-o", f"{folder}/h.png"],
        }
        spent: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(ROUNDS):
            for name, words in commands.items():
                spent[name].append(seconds(words if words[0] == "-c" else ["-m", "sinkscope", *words]))
    base = statistics.median(spent["import pandas"])
    for name, times in spent.items():
        print(f"{name:14} {statistics.median(times):6.2f} s  {statistics.median(times) / base:5.2f} x")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "manifest.json").is_file():
        sys.exit("give one run folder")
    main(sys.argv[1])
