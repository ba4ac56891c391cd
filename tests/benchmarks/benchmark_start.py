"""Seconds that whole commands on saved runs take, as multiples of the time of importing pandas.

    python tests/benchmarks/benchmark_start.py RUN

Each command and the import run seven times in processes of their own, in turn; the least of each are compared, since
other processes on the machine only ever raise them. Seconds are the processor's. `start` is a command that finds no run
where its name says: what it takes before it reads anything. That should be less than 1.5 times the import. Every module
is compiled once, in a first round that is not counted, also where PYTHONDONTWRITEBYTECODE is set: pip compiles what it
installs.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

ROUNDS = 7
IMPORT = "import pandas"


def seconds(words: list[str], code: int, compiled: str) -> float:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment = {**inherited, "PYTHONPYCACHEPREFIX": compiled}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    if subprocess.run([sys.executable, *words], env=environment, check=False, capture_output=True).returncode != code:
        sys.exit(f"{' '.join(words)} did not end with exit code {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(run: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        named = {
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
        commands = {IMPORT: ["-c", "import pandas"]}
        for name, words in named.items():
            commands[name] = ["-m", "sinkscope", *words]
            if run in words:
                nowhere = [f"{folder}/nowhere" if word == run else word for word in words]
                commands[f"{name}, start"] = ["-m", "sinkscope", *nowhere]
        spent: dict[str, list[float]] = {name: [] for name in commands}
        for _ in range(1 + ROUNDS):
            for name, words in commands.items():
                spent[name].append(seconds(words, 2 if name.endswith("start") else 0, f"{folder}/compiled"))
    least = {name: min(times[1:]) for name, times in spent.items()}
    for name, time in least.items():
        print(f"{name:15} {time:6.2f} s  {time / least[IMPORT]:5.2f} x")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "manifest.json").is_file():
        sys.exit("give one run folder")
    main(sys.argv[1])
