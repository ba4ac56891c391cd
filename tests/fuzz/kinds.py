"""The kinds of cases: each draws one damaged input and the command that reads it."""

from __future__ import annotations

import json
from collections.abc import Callable
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

Draw = Callable[[Path, Path, Random], Case]
KINDS: dict[str, tuple[int, Draw]] = {}
"""Number of cases of each kind, and what draws one from the world's folder, the case's folder and a generator."""


def kind(count: int) -> Callable[[Draw], Draw]:
    """Declares a kind of case by the name of its function."""

    def declare(draw: Draw) -> Draw:
        KINDS[draw.__name__] = count, draw
        return draw

    return declare


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


ODD_OPTIONS = (
    "", " ", "-1", "0", "1", "2", "3.5", "1e400", "nan", "inf", "x", "auto", "cpu", "cuda", "cuda:99", "hpu", "1_0",
    "privateuseone", "float16", "int8", "never", "always", "honor", "bos_mass<0.5", "nonesuch>", "prose#x", "%s", "[",
    "first", "0.1,x", "page", "head", "dormant", "markdown", "parquet", "a.txt", "~nobody/x", "a\nb", "é\u2028",
    "::error::x", "\x1b[31m", "x" * 5000, "\udcff", str(10**12), str(10**26), "-" + str(10**26), "9" * 5000,
)  # fmt: skip
ODD_TARGETS = (
    "", ".", "nowhere/x", "deep/er/run", "a", "x" * 300, "a\nb", "~nobody/x", "é", "\udcff", "x.html", "x.svg", "x.csv",
    "x.", "a/heads.csv",
)  # fmt: skip
WRITTEN = {"out", "csv", "junit"}
SOUND: dict[str, list[str]] = {
    "scan": ["{tiny}", *SHORT, "--data", "random", "--out", "run"],
    "ablate": ["{tiny}", "--run", "{a}", "--seq-len", "16", "--num-sequences", "2", "--draws", "2", "--fraction", "0.2",
               "--quiet", "--out", "run"],
    "arms": ["{tiny}", "--arm", "keys:first1", "--arm", "heads:honor:25%", "--run", "{a}", "--seq-len", "16",
             "--num-sequences", "2", "--draws", "2", "--quiet", "--out", "run"],
    "evict": ["{tiny}", "--window", "4", "--sinks", "0,1", "--seq-len", "16", "--num-sequences", "2", "--quiet",
              "--out", "run"],
    "quant": ["{tiny}", "--bits", "3", "--kept", "0,1", "--seq-len", "16", "--num-sequences", "2", "--quiet",
              "--out", "run"],
    "compare": ["{a}", "{b}"], "baseline": ["{a}", "-o", "x.json"],
    "check": ["{a}", "--baseline", "{b}"], "export": ["{a}"],
    "plot": ["{a}", "--figure", "heatmap", "-o", "x.svg"], "report": ["{a}", "-o", "x.html"],
    "bench": ["{tiny}", "--seq-len", "32", "--rounds", "1", "--batch-size", "1", "--quiet"],
    "metrics": [], "schema": [], "examples": [],
    "trigger train": ["--out", "run", "--steps", "1", "--quiet"],
    "trigger scan": ["{tiny}", "--num-sequences", "2"],
    "trigger reproduce": ["--out", "run", "--attention", "nonesuch"],
}  # fmt: skip
"""A sound command line of every command; `trigger reproduce` would train for minutes, so it names no kind there is."""


@kind(400)
def options(world: Path, folder: Path, draw: Random) -> Case:
    """One or two options or arguments of any command, with values of no sense."""
    command = draw.choice([*SOUND, "scan", "scan", "ablate", "bench", "trigger train"])
    words = [word.format(**{name: world / name for name in ("tiny", "a", "b")}) for word in SOUND[command]]
    target = next((words[place + 1] for place, word in enumerate(words) if word in ("--out", "-o")), None)
    for parameter in draw.sample(parameters := parameters_of(command), min(len(parameters), draw.choice([1, 1, 2]))):
        name, is_flag = parameter.name, getattr(parameter, "is_flag", False)
        if parameter.param_type_name == "argument":
            value = draw.choice([each for each in ODD_OPTIONS if not each.startswith("-")])
            if words and not words[0].startswith("-") and draw.random() < 0.7:
                words[0] = value
            else:
                words.append(value)
        elif is_flag:
            words.append(parameter.opts[0])
        elif name in WRITTEN:
            target = draw.choice(ODD_TARGETS)
            words += [parameter.opts[0], target]
        elif not (name == "steps" and command == "trigger train"):
            words += [parameter.opts[0], draw.choice(ODD_OPTIONS)]
    if target == "a":
        lend(world, "a", folder)
    return Case([*command.split(), *words], target)


def parameters_of(command: str) -> list[Any]:
    """The parameters of a command, as typer has them, without --help."""
    import typer

    from sinkscope.cli import app

    found: Any = typer.main.get_command(app)
    for name in command.split():
        found = found.commands[name]
    return [parameter for parameter in found.params if parameter.name != "help"]


VARIABLES: dict[str, tuple[str | None, ...]] = {
    "COLUMNS": ("1", "20", "0", "-5", "x", "100000"),
    "LINES": ("0", "x"),
    "TERM": ("dumb", "", "xterm-256color"),
    "NO_COLOR": ("1", ""),
    "FORCE_COLOR": ("1", "0"),
    "LC_ALL": ("C", "POSIX", "de_DE.UTF-8", "nonsense"),
    "LANG": (None, "C"),
    "HOME": (None, "/nonesuch"),
    "WORLD_SIZE": ("x", "0", "-1", ""),
    "LOCAL_RANK": ("0", "x"),
    "GITHUB_STEP_SUMMARY": ("/nonesuch/x", ".", ""),
    "CI": ("true",),
    "OMP_NUM_THREADS": ("x", "0"),
    "XDG_CACHE_HOME": ("/nonesuch", ""),
}
STREAMS = ("utf-8", "ascii", "latin-1", "cp1252", "utf-16")


@kind(160)
def surroundings(world: Path, folder: Path, draw: Random) -> Case:
    """The streams and the environment, over sound input."""
    case = draw.choice([
        reading(world, draw, str(world / "a")),
        Case(["metrics", *draw.choice([[], ["bos_mass"], ["--json"]])]),
        Case(["schema", *draw.choice([[], ["heads"], ["manifest"]])]),
        Case(["examples"]),
        Case(["--version"]),
        Case([draw.choice([*(name for name in SOUND if " " not in name)]), "--help"]),
        Case(["scan", str(world / "tiny"), "--data", "random", "--seq-len", "16", "--num-sequences", "2", "--out", "é"],
             "é"),
    ])  # fmt: skip
    if case.words[0] == "scan" and str(world / "a") in case.words:
        case.words[case.words.index("--out") + 1] = case.target = "run"
    for name in draw.sample(sorted(VARIABLES), draw.choice([0, 1, 2, 3])):
        case.variables[name] = draw.choice(VARIABLES[name])
    case.encoding = draw.choice(STREAMS)
    case.closed = draw.choice([(), (), (), ("stdout",), ("stderr",), ("stdout", "stderr"), ("full",), ("pipe",)])
    return case
