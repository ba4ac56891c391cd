"""Options of no sense, and odd surroundings, over sound input."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from contract import Case
from world import SHORT, lend

from kinds.declare import kind
from kinds.files import reading

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
WRITTEN = {"out", "csv", "html", "junit", "badge"}
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
    "claims": ["{a}", "{b}", "--quiet", "--out", "run"],
    "show": ["{a}"], "card": ["{a}"], "atlas": ["{a}", "{b}", "-o", "x.html"],
    "figures": ["lampert", "{a}", "--no-maps", "--format", "svg", "-o", "run"],
    "metrics": [], "schema": [], "examples": [],
    "trigger train": ["--out", "run", "--steps", "1", "--quiet"],
    "trigger scan": ["{tiny}", "--num-sequences", "2"],
    "trigger reproduce": ["--out", "run", "--attention", "nonesuch"],
}  # fmt: skip
"""A sound command line of every command; `trigger reproduce` would train for minutes, so it names no kind there is."""


@kind(400)
def options(world: Path, folder: Path, draw: Random) -> Case:
    """One or two options or arguments of any command, with values of no sense."""
    command = draw.choice([*SOUND, "scan", "scan", "ablate", "arms", "bench", "claims", "trigger train"])
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
    if command in ("card", "atlas"):  # which write two files
        target = "."
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
