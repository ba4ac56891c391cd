"""Damaged files: of checkpoints, runs, baselines, policies, pictures, sound and text."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

from contract import Case
from mutations import (
    ODD_TEXTS,
    mutated_bytes,
    mutated_csv,
    mutated_frame,
    mutated_json,
    mutated_json_text,
)
from world import SHORT, lend, write_gguf

from kinds.declare import kind


def scan_of(model: str, world: Path, folder: Path, draw: Random, *more: str) -> Case:
    """`sinkscope scan MODEL`, one time in five over a run that is there."""
    words = ["scan", model, *SHORT, *more, "--out", "run"]
    if draw.random() < 0.2:
        lend(world, "c", folder, "run")
        words += draw.choice([["--force"], ["--force"], ["--resume"], []])
    return Case(words, "run")


@kind(220)
def configurations(world: Path, folder: Path, draw: Random) -> Case:
    model = lend(world, "tiny", folder, "model")
    names = ["config.json"] * 6 + ["tokenizer_config.json", "tokenizer.json", "generation_config.json"]
    path = model / draw.choice(names)
    path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    return scan_of("model", world, folder, draw, "--data", draw.choice(["random", "prose"]))


@kind(130)
def weights(world: Path, folder: Path, draw: Random) -> Case:
    """The index of safetensors, and a file's header and bytes."""
    model = lend(world, "split", folder, "model")
    index = model / "model.safetensors.index.json"
    parts = sorted(model.glob("*.safetensors"))
    how = draw.choice(["index", "index", "header", "bytes", "swap", "remove"])
    part = draw.choice(parts)
    if how == "index":
        index.write_bytes(mutated_json_text(index.read_text("utf-8"), draw))
    elif how == "header":
        data = part.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = mutated_json_text(data[8 : 8 + size].decode(), draw)
        part.write_bytes(len(header).to_bytes(8, "little") + header + data[8 + size :])
    elif how == "bytes":
        part.write_bytes(mutated_bytes(part.read_bytes(), draw, draw.choice([8, 300, None])))
    elif how == "swap":
        part.write_bytes(draw.choice(parts).read_bytes())
    else:
        part.unlink()
    return scan_of("model", world, folder, draw, "--data", "random")


@kind(120)
def ggufs(world: Path, folder: Path, draw: Random) -> Case:
    path = folder / "model.gguf"
    write_gguf(path, draw)
    if draw.random() < 0.7:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw, 500))
    return scan_of("model.gguf", world, folder, draw, "--data", "random")


@kind(520)
def run_folders(world: Path, folder: Path, draw: Random) -> Case:
    """One file of a run folder, and every command that reads one."""
    import pandas as pd

    run = lend(world, "a", folder, "a")
    names = sorted(path.name for path in run.iterdir())
    name = draw.choice([*names, *["manifest.json"] * 8, *["summary.json"] * 4])
    path = run / name
    if draw.random() < 0.05:
        path.unlink()
    elif path.suffix == ".json":
        path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    elif path.suffix == ".csv":
        path.write_bytes(mutated_csv(path.read_text("utf-8"), draw))
    elif draw.random() < 0.3:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    else:
        mutated_frame(pd.read_parquet(path), draw).to_parquet(path, index=False)
    return reading(world, draw, "a")


def reading(world: Path, draw: Random, run: str) -> Case:
    """A command that reads a run folder."""
    other = str(world / draw.choice("abc"))
    cases: list[tuple[list[str], str | None]] = [
        (["report", run, "-o", "x.html"], "x.html"),
        (["report", run, other, "-o", "x.html"], "x.html"),
        (["export", run], None),
        (["export", run, other, "--format", draw.choice(["latex", "csv", "markdown", "bibtex"])], None),
        (["export", run, "--level", draw.choice(["head", "layer", "model"]), "-o", "x.parquet"], "x.parquet"),
        (["export", run, "--heads", draw.choice(["dormant", "sink"])], None),
        (["compare", run, other], None),
        (["compare", other, run, "--json", "--csv", "x.csv"], "x.csv"),
        (["compare", run, other, "--unpaired"], None),
        (["check", run, "--baseline", str(world / "baseline.json"), "--json"], None),
        (["check", other, "--baseline", run, "--junit", "x.xml"], "x.xml"),
        (["baseline", run, "-o", "x.json"], "x.json"),
        (["plot", run, "--figure", draw.choice(["heatmap", "profile", "length", "scatter"]), "-o", "x.svg"], "x.svg"),
        (["scan", str(world / "tiny"), *SHORT, "--data", "random", "--out", run, draw.choice(["--resume", "--force"])],
         run),
    ]  # fmt: skip
    words, target = draw.choice(cases)
    return Case(words, target)


@kind(220)
def baselines(world: Path, folder: Path, draw: Random) -> Case:
    path = folder / "base.json"
    path.write_bytes(mutated_json_text((world / "baseline.json").read_text("utf-8"), draw))
    words = ["check", str(world / draw.choice("abc")), "--baseline", "base.json"]
    words += draw.choice([[], ["--json"], ["--junit", "x.xml"], ["--policy", str(world / "policy.toml")]])
    return Case(words, "x.xml")


@kind(150)
def policies(world: Path, folder: Path, draw: Random) -> Case:
    import tomllib

    text = (world / "policy.toml").read_text("utf-8")
    if draw.random() < 0.3:
        data = mutated_bytes(text.encode(), draw)
    elif draw.random() < 0.05:
        data = b"a = " + b"[" * 50_000
    else:
        data = as_toml(mutated_json(tomllib.loads(text), draw, draw.choice([1, 2]))).encode()
    ours = draw.random() < 0.3
    if ours:
        head = b"[tool.sinkscope]\ncheck = " if draw.random() < 0.3 else b"[tool.sinkscope.check]\n"
        (folder / "pyproject.toml").write_bytes(head + data)
    else:
        (folder / "policy.toml").write_bytes(data)
    words = ["check", str(world / draw.choice("ab")), "--baseline", str(world / "baseline.json")]
    return Case(words + ([] if ours else ["--policy", "policy.toml"]))


def as_toml(data: Any) -> str:
    """TOML of one inline value a line, near enough; what it cannot say stays as JSON, which is damage too."""
    if not isinstance(data, dict):
        return json.dumps(data)
    return "".join(f"{json.dumps(str(name))} = {_inline(value)}\n" for name, value in data.items())


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(str(name))} = {_inline(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return str(value).lower() if isinstance(value, float) else json.dumps(value)


@kind(160)
def media(world: Path, folder: Path, draw: Random) -> Case:
    """Recordings and pictures, and the files that say how they are read."""
    sound = draw.random() < 0.6
    name, model, option = ("wav", "whisper", "--audio") if sound else ("png", "vit", "--images")
    where = lend(world, name, folder)
    source = str(world / model)
    if draw.random() < 0.2:
        source = str(lend(world, model, folder).name)
        path = folder / model / "preprocessor_config.json"
        path.write_bytes(mutated_json_text(path.read_text("utf-8"), draw))
    else:
        path = draw.choice(sorted(where.iterdir()))
        path.write_bytes(mutated_bytes(path.read_bytes(), draw, draw.choice([50, None])))
    words = ["scan", source, option, name, "--num-sequences", "3", "--no-self-check", "--quiet", "--out", "run"]
    return Case(words, "run")


@kind(160)
def texts(world: Path, folder: Path, draw: Random) -> Case:
    import pandas as pd

    name = draw.choice(["x.txt", "x.jsonl", "ids.jsonl", "x.parquet"])
    path = lend(world, f"texts/{name}", folder, name)
    if name == "x.parquet" and draw.random() < 0.7:
        table = pd.read_parquet(path)
        table["text"] = table["text"].astype(object)
        table.at[draw.randrange(len(table)), "text"] = draw.choice(["", "\0", None, "x", "é" * 4000])
        changed = mutated_frame(table, draw)
        try:
            changed.to_parquet(path)
        except (TypeError, ValueError):  # a column of several types has no type in Parquet
            changed.astype(str).to_parquet(path)
    elif name.endswith("jsonl") and draw.random() < 0.7:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
        place = draw.randrange(len(lines))
        lines[place] = mutated_json(lines[place], draw)
        if draw.random() < 0.2:
            lines[place] = {"text": draw.choice(ODD_TEXTS) * 9}
        path.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
    else:
        path.write_bytes(mutated_bytes(path.read_bytes(), draw))
    field = draw.choice(["", "", "", "#text", "#x"])
    return scan_of(str(world / "tiny"), world, folder, draw, "--data", name + field)
