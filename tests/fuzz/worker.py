"""Runs cases in this process, one after the other, under a memory limit. Its parent kills it where one hangs.

`worker.py WORLD SCRATCH` reads lines `KIND SEED NUMBER` and answers each with one line of JSON.
`worker.py WORLD SCRATCH KIND SEED NUMBER` runs one case, prints what it did, and leaves its folder.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1] / folder) for folder in ("fuzz", "support", ".")]

import world  # noqa: E402 - the paths stand above
from contract import Case, Outcome, breaches, files_of  # noqa: E402
from kinds import KINDS  # noqa: E402

ROOM = 3 << 30
"""Bytes that a case may take beyond what the process holds before the first."""


def limit_memory() -> None:
    """Sets the limit on this process's own data, which a plain limit on addresses would set for mapped files too."""
    held = next(line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith("VmData"))
    most = int(held.split()[1]) * 1024 + ROOM
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


@contextlib.contextmanager
def surrounded(case: Case, folder: Path) -> Iterator[dict[str, Path]]:
    """The case's folder, environment, command line and streams; yields the files that hold the streams."""
    variables, there, argv = dict(os.environ), Path.cwd(), sys.argv
    streams = sys.stdout, sys.stderr
    paths = {name: folder.parent / f"{folder.name}-{name}" for name in ("stdout", "stderr")}
    opened = {name: path.open("w", encoding=case.encoding) for name, path in paths.items()}
    opened["stderr"].reconfigure(errors="backslashreplace")  # as Python's own stderr
    if "full" in case.closed:
        opened["stdout"] = Path("/dev/full").open("w", encoding=case.encoding)  # noqa: SIM115 - closed below
    if "pipe" in case.closed:
        reader, writer = os.pipe()
        os.close(reader)
        opened["stdout"] = os.fdopen(writer, "w", encoding=case.encoding)
    os.chdir(folder)
    os.environ.update({name: value for name, value in case.variables.items() if value is not None})
    for name in [name for name, value in case.variables.items() if value is None]:
        os.environ.pop(name, None)
    sys.argv = ["sinkscope", *case.words]
    sys.stdout, sys.stderr = (None if name in case.closed else opened[name] for name in paths)  # type: ignore[assignment]
    try:
        yield paths
    finally:
        sys.stdout, sys.stderr = streams
        sys.argv = argv
        os.chdir(there)
        os.environ.clear()
        os.environ.update(variables)
        for stream in opened.values():
            with contextlib.suppress(OSError):
                stream.close()


def outcome_of(case: Case, folder: Path) -> Outcome:
    """Runs the `sinkscope` command of the case in its folder."""
    from sinkscope.cli import main

    code: Any = None
    trouble = ""
    with surrounded(case, folder) as paths:
        try:
            with case.around():
                main()
        except SystemExit as end:
            code = end.code
        except BaseException as error:
            trouble = f"{type(error).__name__} left the command: {str(error)[:200]}"
    told = []
    for path in paths.values():
        told.append(io.TextIOWrapper(path.open("rb"), case.encoding, errors="replace").read())
        path.unlink()
    return Outcome(code, told[0], told[1], trouble)


def tried(place: Path, scratch: Path, kind: str, seed: str, number: str, keep: bool = False) -> dict[str, Any]:
    """One case from its kind, seed and number: what it ran and every breach of the contract."""
    folder = scratch / f"{kind}-{seed}-{number}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = KINDS[kind][1](place, folder, Random(f"{kind} {seed} {number}"))
    before = files_of(folder)
    outcome = outcome_of(case, folder)
    found = breaches(case, outcome, folder, before)
    if not keep:
        shutil.rmtree(folder, ignore_errors=True)
    shown = f"{shlex.join(case.words)} {case.variables or ''} {case.closed or ''} {case.encoding}"
    return {
        "breaches": found, "command": shown[:600], "code": str(outcome.code), "stderr": outcome.stderr[-600:],
        **({"stdout": outcome.stdout[-3000:], "case": repr(case)} if keep else {}),
    }  # fmt: skip


def main() -> None:
    place, scratch = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    if not place.exists():
        world.build(place)
    import sinkscope.cli
    import sinkscope.present.html.report  # noqa: F401 - imported before the limit is set

    limit_memory()
    if len(sys.argv) > 3:
        print(json.dumps(tried(place, scratch, *sys.argv[3:6], keep=True), indent=1))
        return
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    print(file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(tried(place, scratch, *line.split())), file=answers, flush=True)


if __name__ == "__main__":
    main()
