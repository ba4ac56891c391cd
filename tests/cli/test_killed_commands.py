"""Commands that write several files, killed at random: nothing is lost, and the next call ends with the same bytes as
one that nobody killed. Half of the kills come at any moment, half before any of the changes of files: a command writes
for so short a time that moments drawn over its whole duration hardly ever fall there."""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import Tell
from forked import Kills
from random_share import share_of

from sinkscope.runs.run import load_run

SHORT = ("--seq-len", "24", "--num-sequences", "4", "--quiet")
Files = dict[str, bytes]


@dataclass(frozen=True)
class Command:
    """A command line, `{out}` where it writes, and the names of the files whose bytes do not tell when they were made.

    Attributes:
        whole: its files stand together or not at all. Others are written one by one, each whole.
        resumed: the option of the next call after a kill.
        codes: exit codes of a call that nobody kills.
    """

    words: tuple[str, ...]
    files: tuple[str, ...]
    whole: bool = True
    resumed: str = ""
    codes: tuple[int, ...] = (0,)


COMMANDS = {
    "scan": Command(
        ("scan", "{tiny}", "--measure", "all", "--data", "prose", "--batch-size", "2", *SHORT, "--out", "{out}"),
        ("*.csv", "*.parquet"), resumed="--resume",
    ),
    "track": Command(
        ("track", "{checkpoints}/checkpoint-20", "{checkpoints}/checkpoint-100", "--data", "random", *SHORT, "--out",
         "{out}"), ("*.csv", "step-*/*.csv", "step-*/*.parquet"), whole=False,
    ),
    "arms": Command(
        ("arms", "{tiny}", "--arm", "keys:first1", "--arm", "value:first1", "--draws", "2", *SHORT, "--out", "{out}"),
        ("*.csv",), resumed="--resume",
    ),
    "figures": Command(
        ("figures", "lampert", "{run}", "--no-maps", "--format", "svg", "-o", "{out}"), ("*.svg", "*.md"), whole=False
    ),
    "atlas": Command(("atlas", "{run}", "-o", "{out}/x.html", "--csv", "{out}/x.csv"), ("x.*",), whole=False),
    "report": Command(("report", "{run}", "{other}", "-o", "{out}/x.html"), ("x.*",), whole=False),
    "check": Command(
        ("check", "{run}", "--baseline", "{other}", "--html", "{out}/x.html", "--junit", "{out}/x.xml"), ("x.*",),
        whole=False, codes=(0, 1),
    ),
    "card": Command(("card", "{run}", "-o", "{out}/x.md", "--badge", "{out}/x.svg"), ("x.*",), whole=False),
}  # fmt: skip


@pytest.fixture(scope="module")
def kills() -> Iterator[Kills]:
    started = Kills()
    yield started
    started.end()


@pytest.fixture(scope="module")
def places(tiny_folder: Path, kills: Kills, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the commands read."""
    folder = tmp_path_factory.mktemp("read")
    for step in (20, 100):
        shutil.copytree(tiny_folder, folder / f"checkpoint-{step}")
    for name, dtype in (("run", "float32"), ("other", "bfloat16")):
        words = ("scan", tiny_folder, "--measure", "all", *SHORT, "--dtype", dtype, "--out", folder / name)
        assert kills.run(*words)[0] == 0
    return {"tiny": tiny_folder, "checkpoints": folder, "run": folder / "run", "other": folder / "other"}


def files(out: Path, command: Command) -> Files:
    return {str(path.relative_to(out)): path.read_bytes() for name in command.files for path in out.glob(name)}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_kills_at_random_moments(name: str, places: dict[str, Path], tmp_path: Path, kills: Kills, tell: Tell) -> None:
    """13 of each command, unless a share is asked for: 104 in all."""
    command, draw, seen, among = COMMANDS[name], random.Random(name), Counter[str](), Counter[str]()

    def run(out: Path, *more: str, after: float | None = None, at: int | None = None) -> tuple[int, float]:
        if any(word.startswith("{out}/") for word in command.words):
            out.mkdir(parents=True, exist_ok=True)
        words = [word.format(out=out, **places) for word in command.words]
        return kills.run(*words, *more, after=after, below=tmp_path, at=at)

    code, seconds = run(tmp_path / "unbroken")
    assert code in command.codes
    changes = kills.changes
    assert changes >= len(files(tmp_path / "unbroken", command))
    whole, out = files(tmp_path / "unbroken", command), tmp_path / "there" / "out"
    assert whole
    more: tuple[str, ...] = ()
    while seen.total() < share_of(13):
        writing = seen.total() % 2 == 0
        if writing:
            code, _ = run(out, *more, at=draw.randint(2, changes))
        else:
            code, _ = run(out, *more, after=seconds * draw.uniform(0.1, 1.0))
        assert code in (*command.codes, -signal.SIGKILL)
        found = files(out, command)
        assert all(whole.get(each) == data for each, data in found.items()), "each file is whole"
        if command.whole:
            assert len(found) in (0, len(whole)), sorted(found)
        if code == -signal.SIGKILL:
            seen["nothing" if not found else "all" if len(found) == len(whole) else "some"] += 1
            if 0 < kills.changes < changes:
                among["before a change" if writing else "at a moment"] += 1
        more = (command.resumed,) if (out / "shards").exists() else ()
        if len(found) == len(whole):
            shutil.rmtree(out)
            more = ()
    assert run(out, *more)[0] in command.codes
    assert files(out, command) == whole
    for path in [out, *out.glob("step-*")]:
        if (path / "manifest.json").exists():
            load_run(path)
    assert not [path.name for path in [*out.rglob("*"), *out.parent.iterdir()] if path.name.startswith(".")]
    assert among["before a change"]
    tell(f"kills of {name}: {seen.total()}, which left {dict(seen)}; among the changes of files: {dict(among)}")
