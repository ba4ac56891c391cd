"""What every command keeps to, whatever it is given: the one place that says so."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

CLEAN, FAILED_CHECK, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
LONGEST = 1000
"""Characters of a line on stderr, tmp paths included."""
WARNING, NEXT, WROTE, USAGE = "sinkscope: warning:", "sinkscope: next:", "sinkscope: wrote ", "Usage: "
NOT_DRAWN = "sinkscope: not drawn:"
"""One line for each figure that a run has no numbers for, beside those that were drawn."""
OF_PYTHON = (r"\b[A-Z]\w*(?:Error|Exception|Interrupt)\b", r"unexpected \w+:|Traceback")
"""What no line may hold: an exception's class, or the words for one that nobody foresaw."""
GUEST = "a guest says"
"""What metrics and packages of the cases print, which is shown on stderr as it is."""
Files = dict[str, str]


@dataclass
class Case:
    """One command to try in a folder of its own, in which it runs.

    Attributes:
        words: the command line. target: the file or folder that it is to write, relative; None where it writes nothing.
        variables: environment; None removes one. encoding: of stdout and stderr. closed: streams that are closed.
        around: what else surrounds the command, such as a hub or an installed package.
    """

    words: list[str]
    target: str | None = None
    variables: dict[str, str | None] = field(default_factory=dict)
    encoding: str = "utf-8"
    closed: tuple[str, ...] = ()
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass
class Outcome:
    """What a command did. `trouble`: what became of the process where it did not end by itself."""

    code: object
    stdout: str
    stderr: str
    trouble: str = ""


def files_of(folder: Path) -> Files:
    """Every file below the folder with the hash of its bytes; a folder is named with a slash at its end."""
    return {
        str(path.relative_to(folder)) + "/" * path.is_dir(): ""
        if not path.is_file()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
    }


def breaches(case: Case, outcome: Outcome, folder: Path, before: Files) -> list[str]:
    """Every way in which the outcome breaks the contract; empty where it is clean."""
    if outcome.trouble:
        return [outcome.trouble]
    found = [*_of_the_code(case, outcome), *_of_the_lines(case, outcome)]
    if "--json" in case.words and outcome.code in (CLEAN, FAILED_CHECK) and not case.closed:
        try:
            json.loads(outcome.stdout)
        except ValueError as error:
            found.append(f"stdout is no JSON: {error}")
    return found + _of_the_files(case, outcome, folder, before)


def _of_the_code(case: Case, outcome: Outcome) -> list[str]:
    allowed = {CLEAN, BAD_INPUT, INTERRUPTED} | ({FAILED_CHECK} if case.words[:1] == ["check"] else set())
    return [] if outcome.code in allowed else [f"exit code {outcome.code!r}"]


def _of_the_lines(case: Case, outcome: Outcome) -> list[str]:
    lines = outcome.stderr.splitlines()
    of_python = OF_PYTHON[1:] if "--metrics" in case.words else OF_PYTHON  # whose writer reads the class of an error
    found = [f"{words} on stderr" for each in of_python for words in re.findall(each, outcome.stderr)]
    # A result is written, and said to be, before it is printed: a stream that takes nothing more fails after that.
    beside = (WARNING, NEXT, WROTE, NOT_DRAWN) if outcome.code == CLEAN or case.closed else WARNING
    lines = [line for line in lines if not line.startswith(GUEST)]
    told = [line for line in lines if not line.startswith(beside)]
    if told and told[0].startswith(USAGE):  # typer's three lines before its own error: usage, hint, blank
        told = [line for line in told[1:] if line and not line.startswith("Try ")]
    if len(told) > _lines_of(case):
        found.append(f"{len(told)} lines on stderr")
    if outcome.code == BAD_INPUT and not told and "stderr" not in case.closed:
        found.append("exit code 2 without a word")
    longest = max(map(len, lines), default=0)
    if longest > LONGEST:
        found.append(f"a line of {longest} characters on stderr")
    if "out of memory" in outcome.stderr:
        found.append("more memory than the limit")
    if "\x1b" in outcome.stderr + outcome.stdout * (case.variables.get("FORCE_COLOR") is None):
        found.append("a terminal code in a stream that is no terminal")
    if any(line.startswith("::") for line in (outcome.stdout + "\n" + outcome.stderr).splitlines()):
        found.append("a line that begins as a workflow command")
    return found


def _lines_of(case: Case) -> int:
    """How many lines may say what is wrong: one; of `track` one a step that failed, and one that counts them."""
    if case.words[:1] != ["track"]:
        return 1
    return 1 + len(list(takewhile(lambda word: not word.startswith("--"), case.words[1:])))


def _of_the_files(case: Case, outcome: Outcome, folder: Path, before: Files) -> list[str]:
    """The target is absent, as it was, or whole and new; nothing else has changed."""
    from sinkscope import SinkscopeError, load_run

    after = files_of(folder)
    kept = "--resume" in outcome.stderr  # shards that the error line names
    target = None if case.target is None else str(Path(case.target))
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    strange = [name for name in changed if target is None or name.rstrip("/") not in _with_parents(target)]
    strange = [name for name in strange if target is None or not (target == "." or name.startswith(f"{target}/"))]
    found = [f"changed: {', '.join(strange[:3])}"] if strange and not kept else []
    own = [name for name in changed if name not in strange]
    if case.words[:1] == ["track"]:  # steps stand for themselves: one that failed leaves the others
        return [*found, *_of_the_runs(folder / target, own)]
    if not own or (kept and not any(name in before for name in own)):
        return found
    whole = outcome.code == CLEAN or bool(case.closed)  # a result is written before it is printed
    if (folder / str(target) / "manifest.json").exists():
        try:
            load_run(folder / str(target))
            whole = True
        except SinkscopeError as error:
            return [*found, f"its run cannot be read: {error}"]
    return found if whole else [*found, f"exit code {outcome.code}, and changed: {', '.join(own[:3])}"]


def _of_the_runs(folder: Path, changed: list[str]) -> list[str]:
    """Those of the steps' runs that have changed and cannot be read."""
    from sinkscope import SinkscopeError, load_run

    found = []
    for name in {Path(name).parts[1] for name in changed if len(Path(name).parts) > 1}:
        try:
            if (folder / name).is_dir():
                load_run(folder / name)
        except SinkscopeError as error:
            found.append(f"a step's run cannot be read: {error}")
    return found


def _with_parents(target: str) -> set[str]:
    return {target, *(str(parent) for parent in Path(target).parents)}
