"""What sinkscope has to show on a machine with one NVIDIA GPU, part by part.

    python tests/gpu/battery.py --out FOLDER [PART ...]     # a part's name, or how it begins; all without one
    python tests/gpu/battery.py --list

Each part runs in a process of its own for at most ten minutes and leaves FOLDER/PART.json; FOLDER/summary.md says what
all of them found. A part that is done is not run again: the same command goes on after an interruption, and --minutes
ends it in time. `gather.py` brings what such a machine lacks. --device cpu --tiny tries out the parts themselves,
with TRITON_INTERPRET=1 also the kernels.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIMIT = 600.0
"""Seconds that a part may take."""
DONE, FAILED, LATE = "done", "failed", "out of time"

Start = Callable[[str, float], tuple[int | None, str]]
"""Runs a part for at most so many seconds; returns its exit code, None where the time was up, and its last words."""


def run_parts(names: Iterable[str], out: Path, start: Start, seconds: float = float("inf")) -> list[str]:
    """Runs the parts that are not done, one after the other, and returns those that are left.

    No part begins after `seconds`, and none is given more time than is left. A part writes its own result; what it
    cannot write itself, a crash or the end of its time, is written here.
    """
    out.mkdir(parents=True, exist_ok=True)
    end, left = time.monotonic() + seconds, []
    for name in names:
        if result_of(out, name).get("status") == DONE:
            continue
        given = min(LIMIT, end - time.monotonic())
        if given > 0:
            _result(out, name).unlink(missing_ok=True)
            print(f"{name} ...", flush=True)
            code, words = start(name, given)
            if code is None and given == LIMIT:
                write_result(out, name, {"status": LATE, "said": words})
            elif code is not None and "status" not in result_of(out, name):
                write_result(out, name, {"status": FAILED, "said": words})
        if result_of(out, name).get("status") != DONE:
            left.append(name)
    return left


def result_of(out: Path, name: str) -> dict[str, Any]:
    """The result of a part; empty where it has none, or where its file was not written to its end."""
    try:
        found = json.loads(_result(out, name).read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_result(out: Path, name: str, result: dict[str, Any]) -> None:
    """Writes the result of a part whole or not at all."""
    temporary = _result(out, name).with_suffix(".tmp")
    temporary.write_text(json.dumps(result, indent=1), encoding="utf-8")
    temporary.replace(_result(out, name))


def _result(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def summary(out: Path, names: Iterable[str]) -> str:
    """One line for each part: its name, its status and its figures."""
    lines = ["| part | status | figures |", "|---|---|---|"]
    for name in names:
        result = result_of(out, name)
        figures = ", ".join(f"{key} {_shown(value)}" for key, value in result.get("figures", {}).items())
        said = (result.get("said") or "").strip().splitlines()
        lines.append(f"| {name} | {result.get('status', 'not run')} | {figures or ''.join(said[-1:])} |")
    return "\n".join(lines) + "\n"


def _shown(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def starter(out: Path, words: list[str]) -> Start:
    """Runs a part by this script in a process of its own, which takes its children with it when its time is up."""

    def start(name: str, seconds: float) -> tuple[int | None, str]:
        command = [sys.executable, str(HERE / "battery.py"), "--out", str(out), "--inside", *words, name]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            running = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            code: int | None
            try:
                code = running.wait(seconds)
            except BaseException as error:
                os.killpg(running.pid, signal.SIGKILL)
                running.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = None
            log.seek(0)
            return code, log.read()[-2000:]

    return start


def bring(wheels: Path = HERE / "wheels") -> None:
    """Puts what `gather.py` fetched behind everything that the machine has, for this process and those it starts."""
    found = sorted(wheels.glob("*.whl"))
    unpacked = wheels / "unpacked"
    for wheel in found:
        if not (unpacked / f"{wheel.stem}.there").exists():
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(unpacked)
            (unpacked / f"{wheel.stem}.there").touch()
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support"), str(HERE)]
    sys.path += [str(unpacked)] * bool(found)
    os.environ["SINKSCOPE_BROUGHT"] = str(unpacked) if found else ""


@contextmanager
def interpreted() -> Iterator[None]:
    """With TRITON_INTERPRET=1 the kernels run on the CPU: a rehearsal of what a GPU computes."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    from kernel_cases import mended_interpreter

    from sinkscope.capture.kernels import attend

    attend._compiles = lambda device: True  # type: ignore[assignment]
    with mended_interpreter():
        yield


def arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, help="folder of the results")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the parts out")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no part after so many minutes")
    parser.add_argument("--list", action="store_true", help="print the parts' names")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.out is None and not given.list:
        parser.error("--out FOLDER is needed")
    return given


def main(words: list[str] | None = None) -> int:
    """Returns 0 where every part asked for is done, 1 where some are left, and 2 for a part that does not exist."""
    given = arguments(words)
    bring()
    from parts import Setting, named

    setting = Setting(given.device, given.tiny)
    parts = named(setting)
    asked = [name for name in parts if not given.parts or name.startswith(tuple(given.parts))]
    if not asked:
        print(f"no such part: {' '.join(given.parts)}; --list names them", file=sys.stderr)
        return 2
    if given.list:
        print("\n".join(asked))
        return 0
    if given.inside:
        (name,) = [name for name in asked if name in given.parts]
        with interpreted():
            figures, passed = parts[name]()
        write_result(given.out, name, {"status": DONE if passed else FAILED, "figures": figures})
        return 0
    own = ["--device", given.device, *(["--tiny"] if given.tiny else [])]
    left = run_parts(asked, given.out, starter(given.out, own), given.minutes * 60)
    (given.out / "summary.md").write_text(summary(given.out, asked), encoding="utf-8")
    print(summary(given.out, asked), end="")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
