"""Shows what `sinkscope.watch` reads in other people's programs, and checks it against these libraries' own maps.

    python tests/support/client_evidence.py [--write] [NAME...]

For each client of tests/support/clients.py, all by default: the line that a user types, the first lines that it prints,
the screen of the run, the figures of one head beside those of the library's own float64 maps, whether what the program
computes is the same bit for bit without a watch, and what an error in the middle leaves behind. A client that is not
installed is named in a line. `--write` puts what was found into docs/clients.json; `python docs/write_pages.py` then
writes docs/clients.md. Every client runs in a process of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import client_maps
import numpy as np
import torch
from clients import CLIENTS, ROOT, Client, filled, folders, program_of
from left_behind import left, state
from torch import nn

import sinkscope

RECORD = ROOT / "docs" / "clients.json"
FIRST_LINES, SCREEN_LINES = 6, 15
WIDTH = 110
"""Characters of a printed line that are shown."""
COLUMNS = ("bos_mass", "entropy")
TIMES = re.compile(r"'train_(runtime|samples_per_second|steps_per_second)': '?[\d.e-]+'?")
"""What two runs of a trainer print differently."""


@dataclass(frozen=True)
class Check:
    """A column of one head: what sinkscope measured, what the library's own maps give, and how far the two are apart,
    there and at most in any head."""

    column: str
    sinkscope: float
    own: float
    difference: float
    largest: float


@dataclass(frozen=True)
class Evidence:
    """All that is shown of a client.

    Attributes:
        name, library, version, maps: the client, and how its own maps were read.
        command: the line that a user types.
        printed: the first lines of what it prints, and what sinkscope says at its end.
        screen: the first lines of `sinkscope show` at 80 columns.
        head: the head that is checked; `heads`: how many were compared.
        checks: its columns.
        calls: calls of the model's linear layers.
        the_same: whether all their outputs, and what the program returns, are the same bit for bit with and without a
            watch.
        prints_the_same: whether the command prints what the program prints without it; None where the program calls
            `watch` itself, and there is no such command.
        left: what is left after an error in the middle of these calls, and would not be without a watch.
    """

    name: str
    library: str
    version: str
    maps: str
    command: str
    printed: list[str]
    screen: list[str]
    head: str
    heads: int
    checks: list[Check]
    calls: int
    the_same: bool
    prints_the_same: bool | None
    left: list[str]


def evidence(key: str) -> Evidence:
    """All that is shown of a client. Changes the working folder of this process to a temporary one."""
    client = CLIENTS[key]
    places = folders(client.program)
    place = Path(tempfile.mkdtemp())
    (place / "examples").symlink_to(ROOT / "examples")
    os.chdir(place)
    program, arguments = program_of(client), [filled(each, places) for each in client.arguments]
    printed, prints_the_same = _typed(client, client.typed(key), places)
    work = Work(client, program, arguments)
    calls, the_same, run = work.twice()
    if not (place / "runs" / key).is_dir():  # the program does not save what it watched
        run.save(place / "runs" / key)
    own = client_maps.figures(client.own(program, *arguments))
    head, heads, checks = _checked(sinkscope.load_run(place / "runs" / key), client.domain, own)
    screen = _first_paragraphs(_shell(f"sinkscope show runs/{key}", places).stdout.splitlines())
    return Evidence(
        client.name, client.library, client.version or "", client.maps, client.typed(key), printed,
        "\n".join(screen).rstrip().splitlines(), head, heads, checks, calls, the_same, prints_the_same,
        work.left_by_an_error(calls // 2),
    )  # fmt: skip


# As a user types it


def _typed(client: Client, line: str, places: dict[str, str]) -> tuple[list[str], bool | None]:
    """The first lines that a command prints, and whether the program prints the same by itself."""
    watched = _shell(line, places)
    said = [each for each in watched.stderr.splitlines() if each.startswith("sinkscope: ")]
    printed = [each.rstrip() for each in watched.stdout.splitlines() if each.strip()][:FIRST_LINES]
    for name, folder in places.items():
        printed = [each.replace(folder, f"${name}") for each in printed]
    shown = [each if len(each) <= WIDTH else f"{each[:WIDTH]} ..." for each in printed + said]
    if client.watches:
        return shown, None
    alone = _shell(f"python {client.program}", places)
    return shown, TIMES.sub("", watched.stdout) == TIMES.sub("", alone.stdout)


def _shell(line: str, places: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs `sinkscope ...` or `python ...` in the working folder, at 80 columns. Raises RuntimeError where it fails."""
    first, *words = filled(line, places).split()
    ours = {"HF_HUB_OFFLINE": "1", "COLUMNS": "80", "PYTHONPATH": str(ROOT)}
    start = [sys.executable] if first == "python" else [sys.executable, "-m", "sinkscope"]
    done = subprocess.run([*start, *words], env=os.environ | ours, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{line}\n{done.stdout}{done.stderr}")
    return done


# Within this process


class Work:
    """What a program does with a model, again and again from the start."""

    def __init__(self, client: Client, program: Any, arguments: list[str]) -> None:
        self.client, self.program, self.arguments = client, program, arguments

    def load(self) -> tuple[Any, nn.Module]:
        """What the program loads, and the model in it."""
        loaded = self.program.load(*self.arguments)
        return loaded, getattr(loaded, self.client.trained) if self.client.trained else loaded

    def do(self, loaded: Any, label: Callable[[str], None]) -> Any:
        """What the program returns."""
        given = {"label": label} if self.client.watches else {}
        return self.program.work(loaded, *self.arguments[1:], **given)

    def twice(self) -> tuple[int, bool, sinkscope.Run]:
        """Without a watch and with one: the calls of linear layers, whether all that they return is the same bit for
        bit, and the run."""
        loaded, model = self.load()
        with hashed(model) as alone:
            returned = self.do(loaded, lambda _: None)
        loaded, model = self.load()
        with hashed(model) as watched, sinkscope.watch(model, every=self.client.every) as seen:
            again = self.do(loaded, seen.label)
        return len(alone), alone == watched and _equal(returned, again), seen.run()

    def left_by_an_error(self, call: int) -> list[str]:
        """What is left where a linear layer fails in a call, and what the program does not leave without a watch."""
        alone, watched = (self._left(call, watch) for watch in (_unwatched, sinkscope.watch))
        return [each for each in watched if each not in alone]

    def _left(self, call: int, watch: Callable[[nn.Module], Any]) -> list[str]:
        loaded, model = self.load()
        library = self.client.library.replace("-", "_")
        before = state(model, library)
        with failing(model, call), watch(model) as seen:
            self.do(loaded, seen.label)
        return left(before, state(model, library))


@contextmanager
def _unwatched(model: nn.Module) -> Iterator[Any]:
    yield SimpleNamespace(label=lambda _: None)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


@contextmanager
def hashed(model: nn.Module) -> Iterator[list[str]]:
    """Collects a hash of what each linear layer returns, call by call."""
    found: list[str] = []

    def note(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        found.append(hashlib.sha256(output.detach().contiguous().numpy().tobytes()).hexdigest())

    hooks = [each.register_forward_hook(note) for each in model.modules() if isinstance(each, nn.Linear)]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


class Broken(Exception):
    """The error in the middle."""


@contextmanager
def failing(model: nn.Module, call: int) -> Iterator[None]:
    """In the block, the call of a linear layer with this number fails. Raises RuntimeError where the error does not
    come out of the block."""
    count = 0

    def fail(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == call:
            raise Broken

    hooks = [each.register_forward_hook(fail) for each in model.modules() if isinstance(each, nn.Linear)]
    try:
        yield
    except Broken:
        return
    finally:
        for hook in hooks:
            hook.remove()
    raise RuntimeError("the error in the middle did not come out")


def _first_paragraphs(lines: list[str]) -> list[str]:
    """The first lines of a screen, to the end of a paragraph."""
    return lines[: lines.index("", SCREEN_LINES) if "" in lines[SCREEN_LINES:] else None]


# The figures of one head


def _checked(run: sinkscope.Run, domain: str | None, own: dict[str, np.ndarray]) -> tuple[str, int, list[Check]]:
    """The head with the most attention on the first token, how many heads there are, and its columns."""
    rows = run.heads if domain is None else run.heads[run.heads["domain"] == domain]
    best = int(own["bos_mass"].argmax())
    row = rows.iloc[best]
    return f"layer {row['layer']}, head {row['head']}", len(rows), [
        _check(name, rows[name].to_numpy(float), own[name], best) for name in COLUMNS
    ]  # fmt: skip


def _check(name: str, measured: np.ndarray, own: np.ndarray, head: int) -> Check:
    apart = np.abs(measured - own)  # of other numbers of heads it raises ValueError
    return Check(name, *map(float, (measured[head], own[head], apart[head], apart.max())))


# Printed

WORDS = {True: "the same", False: "NOT THE SAME", None: "not compared"}


def text(key: str, found: Evidence) -> str:
    """The evidence for a reader."""
    lines = [f"== {key}: {found.library} {found.version}", "", f"$ {found.command}", *found.printed, ""]
    lines += [f"$ sinkscope show runs/{key}", *found.screen, "...", "", f"{found.head}, own maps: {found.maps}"]
    for each in found.checks:
        lines.append(
            f"{each.column:<9} sinkscope {each.sinkscope:.8f}  own {each.own:.8f}  difference {each.difference:.1e}, "
            f"at most {each.largest:.1e} in {found.heads} heads"
        )
    same, prints = (WORDS[each] for each in (found.the_same, found.prints_the_same))
    lines += [f"outputs of {found.calls} calls of linear layers: {same}, bit for bit; what is printed: {prints}"]
    return "\n".join([*lines, f"left by an error in call {found.calls // 2}: {', '.join(found.left) or 'nothing'}", ""])


def main(words: list[str]) -> None:
    """Prints, and writes where `--write` is among the words."""
    names = [each for each in words if not each.startswith("--")] or list(CLIENTS)
    if "--json" in words:
        print(json.dumps(asdict(evidence(names[0]))))
        return
    for name in names:
        if CLIENTS[name].version is None:
            print(f"{name}: {CLIENTS[name].library} is not installed")
            continue
        found = of_process(name)
        print(text(name, found), flush=True)
        if "--write" in words:
            record(name, found)


def of_process(name: str) -> Evidence:
    """The evidence of a client, gathered in a process of its own. Raises RuntimeError where it fails."""
    ours = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, _PATHS))}
    command = [sys.executable, __file__, "--json", name]
    done = subprocess.run(command, env=os.environ | ours, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    return Evidence(**found | {"checks": [Check(**each) for each in found["checks"]]})


_PATHS = (ROOT, ROOT / "tests", ROOT / "tests" / "support")


def record(name: str, found: Evidence) -> None:
    """Puts the evidence into docs/clients.json, in the order of CLIENTS."""
    known = json.loads(RECORD.read_text("utf-8")) if RECORD.is_file() else {}
    known[name] = asdict(found)
    ordered = {each: known[each] for each in CLIENTS if each in known}
    RECORD.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
