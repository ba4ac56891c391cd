"""Interventions, measurements of them that stopped half-way, and checkpoints of a training."""

from __future__ import annotations

from pathlib import Path
from random import Random

from contract import Case
from mutations import mutated_bytes, mutated_csv, mutated_json_text
from world import ARMS, ARMS_OPTIONS, lend

from kinds.declare import kind

FEW = ("--seq-len", "16", "--num-sequences", "2", "--draws", "2", "--quiet")
PIECES = (
    "heads", "dynamic", "value", "keys", "window", "kv", "acts", "massive", "neuron", "nonesuch", "", ":", "+", "/",
    "%", ".", ",", " ", "honor", "bos_mass", "low", "first", "middle", "recent", "random", "sinks", "sink-tokens",
    "full", "tensor", "token", "others", "0", "1", "2", "3", "5", "25", "100", "-1", "1e9", "99999999999999999999",
    "0.0", "0.1", "nan", "x" * 300, "é", "\n", "::error::x",
)  # fmt: skip
SOUND = (
    "heads:honor:25%", "heads:honor:low5%", "heads:0.1+1.0", "heads:random2", "dynamic:honor:5%", "value:first1",
    "keys:sinks", "keys:middle2", "window:4+1", "window:4+random1/full", "window:4+1/honor:50%", "kv:3+first1", "kv:4",
    "acts:8/tensor", "acts:4/token+first1", "keys:first1",
)  # fmt: skip


def odd_arm(draw: Random) -> str:
    """The text of an arm: pieces of the grammar in any order, or a sound arm with a piece put in, out or twice."""
    if draw.random() < 0.4:
        return "".join(draw.choice(PIECES) for _ in range(draw.randrange(1, 7)))
    text = draw.choice(SOUND)
    for _ in range(draw.choice([1, 1, 2])):
        place = draw.randrange(len(text) + 1)
        text = text[:place] + draw.choice([*PIECES, ""]) + text[place + draw.randrange(3) :]
    return text


@kind(300)
def arms(world: Path, folder: Path, draw: Random) -> Case:
    """Texts of arms, one to three of them, with and without a run."""
    words = ["arms", str(world / "tiny"), *FEW]
    for _ in range(draw.choice([1, 1, 2, 3])):
        words += ["--arm", odd_arm(draw) if draw.random() < 0.7 else draw.choice(SOUND)]
    if draw.random() < 0.6:
        words += ["--run", str(world / draw.choice("abc"))]
    return Case([*words, "--out", "run"], "run")


@kind(120)
def unfinished_arms(world: Path, folder: Path, draw: Random) -> Case:
    """A measurement that stopped half-way and goes on over damaged batches."""
    shards = lend(world, "arms", folder, "run") / "shards"
    for path in draw.sample(sorted(shards.iterdir()), draw.choice([1, 1, 2])):
        how = draw.random()
        if how < 0.1:
            path.unlink()
        elif how < 0.2:
            path.unlink()
            path.mkdir()
        elif how < 0.6:
            path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
        else:
            path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    words = [word for arm in ARMS for word in ("--arm", arm)]
    options = [word for name, value in ARMS_OPTIONS.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return Case(["arms", str(world / "tiny"), *words, *options, "--quiet", "--resume", "--out", "run"], "run")


ODD_STEPS = (
    "checkpoint-x", "checkpoint-", "checkpoint-020", "checkpoint--1", "checkpoint-1e3", "checkpoint-" + "9" * 23, "20",
    "é", "checkpoint-20-copy",
)  # fmt: skip


@kind(130)
def trainings(world: Path, folder: Path, draw: Random) -> Case:
    """Checkpoints of a training, of which one is odd, beside tables that stand there."""
    for step in (20, 100):
        lend(world, f"training/checkpoint-{step}", folder, f"checkpoint-{step}")
    names = ["checkpoint-20", "checkpoint-100"]
    if draw.random() < 0.5:
        lend(world, "tracked", folder, "out")
    damaged = folder / draw.choice(names)
    how = draw.choice(["name", "state", "config", "table", "step", "folder", "other", "none"])
    if how == "name":
        names[0] = draw.choice(ODD_STEPS)
        (folder / "checkpoint-20").rename(folder / names[0])
    elif how == "state":
        (damaged / "trainer_state.json").write_bytes(mutated_json_text('{"global_step": 20, "epoch": 1.0}', draw))
    elif how == "config":
        path = damaged / "config.json"
        path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    elif how == "table" and (folder / "out").exists():
        path = folder / "out" / draw.choice(["trajectory.csv", "emergence.csv"])
        path.write_bytes(mutated_csv(path.read_text("utf-8"), draw))
    elif how == "step" and (folder / "out").exists():
        path = folder / "out" / "step-00000020" / draw.choice(["manifest.json", "summary.json"])
        path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    elif how == "folder":
        names[0] = draw.choice(["nowhere", ".", "checkpoint-20/config.json", "checkpoint-100"])
    elif how == "other":
        names[0] = str(world / "split")
    words = [
        "track",
        *names,
        "--data",
        "random",
        "--seq-len",
        "16",
        "--num-sequences",
        "3",
        "--bos",
        "never",
        "--quiet",
    ]
    return Case([*words, "--out", "out"], "out")
