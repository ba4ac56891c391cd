"""Every command that README and the pages show is run, in order, in one fresh folder a page.

A small random Gemma-3 stands in for example:gemma-3-270m: it has that model's layers and heads, not its size. The first
run's answer is compared on the real checkpoint. A command with the mark `# needs ...` or `# takes ...` is not run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_tokenizer
from pages import PAGES, ROOT, Command, answer, commands, differences, python_blocks
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sinkscope.cli import app

WITH_COMMANDS = [page for page in PAGES if any(each.run for each in commands(page.read_text("utf-8")))]
FIRST = "scan example:gemma-3-270m"


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache in which example:gemma-3-270m is a small random model of its shape."""
    cache = tmp_path_factory.mktemp("cache")
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "gemma3_text", vocab_size=VOCABULARY, hidden_size=32, intermediate_size=32, num_hidden_layers=18,
        num_attention_heads=4, num_key_value_heads=1, head_dim=8, sliding_window=512, max_position_embeddings=4096,
        bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    folder = cache / "gemma-3-270m-q4_k_m"
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return cache


def type_in(command: Command) -> str:
    """Runs the command in the working folder; returns what it printed."""
    done = CliRunner().invoke(app, list(command.words))
    assert done.exit_code == 0, (command.words, done.output, done.exception)
    if command.into:
        Path(command.into).write_text(done.stdout, "utf-8")
    return done.stdout


def short(command: Command) -> Command:
    """A scan reads eight sequences where the page leaves their number to the default."""
    if command.words[0] != "scan" or "--num-sequences" in command.words:
        return command
    return replace(command, words=(*command.words, "--num-sequences", "8"))


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_the_commands_of_a_page(page: Path, stand_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKSCOPE_CACHE", str(stand_in))
    monkeypatch.chdir(tmp_path)
    for command in commands(page.read_text("utf-8")):
        if command.run:
            type_in(short(command))


@pytest.mark.slow
@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "python.md"], ids=lambda page: page.name)
def test_the_python_of_a_page(
    page: Path, stand_in: Path, tiny_model: torch.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SINKSCOPE_CACHE", str(stand_in))
    monkeypatch.chdir(tmp_path)
    names = {"model": tiny_model, "input_ids": torch.randint(3, VOCABULARY, (2, 32))}
    for block in python_blocks(page.read_text("utf-8")):
        exec(compile(block, page.name, "exec"), names)


@pytest.mark.slow
@pytest.mark.real
def test_the_first_run_answers_as_the_pages_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = type_in(Command(tuple(FIRST.split()), None, True))
    for page in (ROOT / "README.md", ROOT / "docs" / "first-run.md"):
        shown = answer(page.read_text("utf-8"), "example:gemma-3-270m")
        assert differences(printed, shown) == [], page.name
