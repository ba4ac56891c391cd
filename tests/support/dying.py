"""Breaks a save off at its n-th step: an interrupt in this process, or a kill of a fork of it.

A step is a call that changes names on the disk or waits for it: rename, replace, unlink, rmdir, mkdir, link, fsync, and
the exchange of two folders.

Usage: dying.py NEW OLD SHARDS PLAIN STATES writes the files of the run NEW over a copy of the run OLD, to which the
folder SHARDS was added (`-`: none). It does so again and again, and kills the n-th save at its n-th step until one
ends. STATES/n/run is what the n-th left. PLAIN `plain` takes the exchange away, as on a system without it. It prints
the steps of the whole save.
"""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from sinkscope.runs import whole
from sinkscope.runs.run import RUN_FOLDER

STEPS = ("rename", "replace", "unlink", "rmdir", "mkdir", "link", "fsync")


def _no_exchange(one: Path, other: Path) -> None:
    raise OSError(errno.EINVAL, "no such call")


@contextmanager
def broken_off(last: int, act: Callable[[], Any], plain: bool = False) -> Iterator[list[str]]:
    """Calls `act` in place of the step number `last`; gives the list of the steps taken. `plain`: no exchange."""
    taken: list[str] = []

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def step(*args: Any, **kwargs: Any) -> Any:
            taken.append(name)
            if len(taken) == last:
                act()
            return call(*args, **kwargs)

        return step

    exchange = counted("exchange", _no_exchange if plain else whole.exchange)
    patches = {name: counted(name, getattr(os, name)) for name in STEPS}
    with mock.patch.multiple(os, **patches), mock.patch.object(whole, "exchange", exchange):
        yield taken


def prepare(out: Path, old: str, shards: str) -> None:
    """Makes `out` a copy of the run `old` with `shards` in it; leaves it out where both are `-`."""
    out.parent.mkdir(parents=True)
    if old != "-":
        shutil.copytree(old, out)
    if shards != "-":
        shutil.copytree(shards, out / "shards")


def save(new: str | Path, out: Path) -> None:
    """Writes the files of the run `new` into the run folder `out`."""

    def fill(work: Path) -> None:
        for path in Path(new).iterdir():
            shutil.copyfile(path, work / path.name)

    RUN_FOLDER.write(out, True, fill)


def main(new: str, old: str, shards: str, plain: str, states: str) -> None:
    for number in itertools.count(1):
        out = Path(states) / str(number) / "run"
        prepare(out, old, shards)
        child = os.fork()
        if not child:
            with broken_off(number, lambda: os._exit(9), plain == "plain") as taken:
                save(new, out)
            sys.stdout.write(" ".join(taken))
            sys.stdout.flush()
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            return


if __name__ == "__main__":
    main(*sys.argv[1:])
