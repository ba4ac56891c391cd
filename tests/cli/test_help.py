"""`--help` on a screen of 80 columns, the examples in it, and near names for a slip of the keyboard."""

from __future__ import annotations

import glob
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import SHORT, make_model
from tiers import slow_but
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.cli.help import PANELS, examples
from sinkscope.errors import did_you_mean


def invoke(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


def every_command(group: Any = None, before: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """Every command by its words."""
    found: dict[tuple[str, ...], Any] = {}
    for name, command in (group or typer.main.get_command(app)).commands.items():
        inside = hasattr(command, "commands")
        found |= every_command(command, (*before, name)) if inside else {(*before, name): command}
    return found


COMMANDS = every_command()


def headings(text: str) -> list[str]:
    return re.findall(r"^(\S.*):$", text, re.M)


def test_the_options_of_scan_stand_in_panels_with_the_most_used_first() -> None:
    text = invoke("scan", "--help").stdout
    assert headings(text) == [name for name in PANELS if name not in ("Options", "How a model is scanned on the spot")]
    first = text.partition("Most used:")[2].partition("What is read:")[0]
    assert re.findall(r"^  (?:-o, )?(--[a-z-]+)", first, re.M) == ["--data", "--seq-len", "--num-sequences", "--out"]
    read = text.partition("What is read:")[2].partition("How the model")[0]
    assert {"--bos", "--first", "--generate", "--prepend", "--seed", "--images", "--audio", "--prompt"} == set(
        re.findall(r"^  (--[a-z-]+)", read, re.M)
    )


@pytest.mark.parametrize("words", slow_but(map(" ".join, COMMANDS), "scan", "check"))
def test_help_fits_80_columns_and_names_no_type_of_python(words: str) -> None:
    text = invoke(*words.split(), "--help").stdout
    assert [line for line in text.splitlines() if len(line) > 80] == []
    assert re.findall(r"<(?:str|int|float|path|list\S*)>", text) == []
    assert "  [default" not in re.sub(r"\n +", "\n", text)


def test_scan_and_track_share_their_options() -> None:
    """Options of one name are one declaration: the same words, panel and default."""

    def options(name: str) -> dict[str, Any]:
        return {
            each.name: each for each in COMMANDS[(name,)].params if each.name not in ("model", "out", "force", "quiet")
        }

    scan, track = options("scan"), options("track")
    shared = (scan.keys() & track.keys()) - {"as_json"}
    assert len(shared) == 11
    for name in shared:
        mine, theirs = scan[name], track[name]
        assert (mine.help, mine.default, mine.rich_help_panel) == (theirs.help, theirs.default, theirs.rich_help_panel)


def test_the_help_of_ablate_names_no_default_without_a_run() -> None:
    """`--run` is required there."""
    shown = CliRunner().invoke(app, ["ablate", "--help"]).stdout
    assert "Tokens per sequence. [default: the run's]" in shown
    assert "no --run" not in shown


def test_one_letter_means_the_same_in_every_command() -> None:
    named = {words: each.opts for words, command in COMMANDS.items() for each in command.params if "--out" in each.opts}
    assert len(named) > 15
    assert {words: opts for words, opts in named.items() if opts != ["--out", "-o"]} == {}


def test_the_summary_of_a_command_is_whole() -> None:
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]


def test_an_example_is_broken_where_a_shell_joins_it() -> None:
    text = invoke("ablate", "--help").stdout
    found = text.partition("Example: ")[2].partition("\n\n")[0]
    assert " \\\n" in found
    assert shlex.split(found.replace("\\\n", " ")) == examples(COMMANDS[("ablate",)].help)[0]


# Near names


@pytest.mark.parametrize(
    ("name", "known", "said"),
    [
        ("bos", ("entropy", "bos_mass", "sink_rate"), "; did you mean bos_mass?"),
        ("Prose", ("prose", "code"), "; did you mean prose?"),
        ("heat", ("heatmap", "profile"), "; did you mean heatmap?"),
        ("meta-llama/Llama-3-8B", ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3-8B"), 
        "; did you mean meta-llama/Meta-Llama-3-8B or meta-llama/Llama-3.1-8B?"),
        ("gema", ("minilm", "gemma-3-270m"), "; did you mean gemma-3-270m?"),
        ("tain", ("train", "trail", "study"), "; did you mean train or trail?"),
        ("zzz", ("prose", "code"), ""),
        ("x", ("xml", "csv"), ""),
    ],
)  # fmt: skip
def test_near_names(name: str, known: tuple[str, ...], said: str) -> None:
    assert did_you_mean(name, known) == said


def test_a_wrong_command_and_a_wrong_option_get_the_near_ones() -> None:
    assert "No such command 'scna'; did you mean scan?" in invoke("scna").stderr
    assert "did you mean --num-sequences" in invoke("scan", "x", "--num-sequence", "3").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("scan", "x", "--seq-len", "many"), "--seq-len 'many': a whole number is needed (sinkscope scan --help"),
        (("scan", "x", "--seq-len", "64", "--seq-len", "many"), "--seq-len 'many': a whole number is needed"),
        (("scan", "x", "--prepend", "8", "--prepend", "a", "--prepend", "9"), "--prepend 'a': a whole number is"),
        (("scan", "x", "--epsilon=half"), "--epsilon 'half': a number is needed (sinkscope scan --help"),
        (("plot", "x", "--head", "1.\x1b[2J"), "--head '1.\\x1b[2J': a whole number is needed (sinkscope plot --help"),
        (("scan", "x", "--seq-len", "x" * 5000), f"--seq-len '{'x' * 197}...': a whole number is needed"),
        (("check",), "Missing argument 'RUN_OR_MODEL' (sinkscope check --help"),
        (("trigger", "train", "--nonesuch"), "No such option: --nonesuch (sinkscope trigger train --help"),
        (("--nonesuch",), "No such option: --nonesuch (sinkscope --help"),
        (("--" + "x" * 5000,), f"No such option: --{'x' * 779}... (sinkscope --help"),
        (("scna",), "No such command 'scna'; did you mean scan? (sinkscope --help"),
    ],
)  # fmt: skip
def test_wrong_words_are_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    refused = invoke(*words)
    assert (refused.exit_code, refused.stdout) == (2, "")
    (line,) = refused.stderr.splitlines()
    assert line.replace("root", "sinkscope").startswith(f"sinkscope: error: {said}"), line


def test_a_group_without_a_command_shows_its_help() -> None:
    assert invoke("trigger").exit_code in (0, 2)
    assert "Usage: " in invoke("trigger").output


# Every example runs


SHORTER: dict[tuple[str, ...], tuple[str, ...]] = {
    ("scan",): SHORT,
    ("track",): SHORT,
    ("ablate",): ("--seq-len", "32", "--num-sequences", "2", "--draws", "2"),
    ("arms",): ("--seq-len", "32", "--num-sequences", "2", "--draws", "2"),
    ("evict",): ("--window", "16", "--seq-len", "64", "--num-sequences", "2", "--draws", "2"),
    ("quant",): ("--seq-len", "32", "--num-sequences", "2", "--draws", "2"),
    ("bench",): ("--rounds", "1", "--seq-len", "64"),
    ("claims",): SHORT,
    ("trigger", "train"): ("--steps", "5"),
    ("trigger", "study"): ("--steps", "5"),
}
"""What makes an example short: a later option replaces an earlier one."""


PROGRAM = """
import torch
from transformers import AutoModelForCausalLM

AutoModelForCausalLM.from_pretrained("tiny").eval()(torch.arange(3, 40)[None])
"""
"""What the example of `watch` runs."""


@pytest.mark.slow
def test_every_example_runs(tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the program, in one folder, with a tiny model for the one that takes half a minute to load."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sinkscope.trigger.reproduce.QUICK_SIZES", (1,))
    tiny = tmp_path / "tiny"
    make_model(num_hidden_layers=6).save_pretrained(tiny)
    tokenizer.save_pretrained(tiny)
    for step in (10, 20):
        shutil.copytree(tiny, tmp_path / "out" / f"checkpoint-{step}")
    (tmp_path / "answer.py").write_text(PROGRAM, "utf-8")
    for name in ("base", "finetuned", "minilm"):
        assert invoke("scan", tiny, *SHORT, "--out", f"runs/{name}").exit_code == 0
    ran = 0
    for words, command in COMMANDS.items():
        for example in examples(command.help):
            assert example[0] == "sinkscope"
            typed = [str(tiny) if word == "example:gemma-3-270m" else word for word in example[1:]]
            typed = [name for word in typed for name in (sorted(glob.glob(word)) if "*" in word else [word])]  # noqa: PTH207
            result = invoke(*typed, *SHORTER.get(words, ()))
            assert result.exit_code == 0, (example, result.output)
            ran += 1
    assert ran >= len(COMMANDS)
