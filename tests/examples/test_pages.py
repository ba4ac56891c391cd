"""Every command that README and the pages show is run, in order, in one fresh folder a page.

A small random Gemma-3 stands in for example:gemma-3-270m: it has that model's layers and heads, not its size. Where a
share of random cases is drawn, passes are fewer than the pages have them (`SHORTER`). The first run's answer is
compared on the real checkpoint. A command with the mark `# needs ...` or `# takes ...` is not run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import VOCABULARY, make_tokenizer
from pages import PAGES, ROOT, Command, answer, commands, differences, python_blocks
from random_share import SHARE
from tiers import nightly
from transformers import AutoConfig, AutoModelForCausalLM
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.runs.run import load_run

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


SHORTER = {
    "scan": ("--num-sequences", "4"),
    "ablate": ("--num-sequences", "2", "--draws", "2"),
    "arms": ("--num-sequences", "2", "--draws", "2"),
    "evict": ("--num-sequences", "2"),
    "quant": ("--num-sequences", "2"),
    "bench": ("--seq-len", "256", "--rounds", "1", "--batch-size", "1"),
    "trigger train": ("--steps", "100"),
}
"""What a command is given where not all random cases are drawn; the later of two options counts."""


def short(command: Command) -> Command:
    """A scan reads eight sequences where the page leaves their number to the default; `SHORTER` for a share alone."""
    words = command.words
    if SHARE < 1:
        return replace(command, words=(*words, *SHORTER.get(words[0], SHORTER.get(" ".join(words[:2]), ()))))
    if words[0] != "scan" or "--num-sequences" in words:
        return command
    return replace(command, words=(*words, "--num-sequences", "8"))


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


@pytest.mark.slow
@pytest.mark.real
def test_the_dry_run_counts_what_its_page_says() -> None:
    """But for the memory that is free on the machine."""
    page = answer((ROOT / "docs" / "dry-run.md").read_text("utf-8"), "Dry run of scan")
    printed = type_in(Command((*FIRST.split(), "--dry-run"), None, True))
    told, shown = ("\n".join(line for line in text.splitlines() if "free now" not in line) for text in (printed, page))
    assert differences(told, shown) == []


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_the_sinks_without_bos_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "tokens.md").read_text("utf-8")
    title = "tokens that are sinks on prose bos=never"
    asked = next(line for line in page.splitlines() if line.startswith("    sinkscope scan"))
    printed = type_in(Command(tuple(asked.split()[1:]), None, True))
    assert differences(printed[printed.index(title) :], answer(page, title)) == []


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_the_ablation_answers_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "commands" / "ablate.md").read_text("utf-8")
    scan, ablate = (each for each in commands(text) if each.words[0] in {"scan", "ablate"})
    type_in(scan)
    assert differences(type_in(ablate), answer(text, "example:gemma-3-270m: loss")) == []


@pytest.mark.slow
@pytest.mark.real
@nightly
def test_the_domains_that_differ_are_those_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Differences and their intervals, as the page's table has them."""
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "examples" / "gemma-3.md").read_text("utf-8")
    (asked,) = [each for each in commands(page) if each.words[-1] == "runs/gemma-domains"]
    type_in(asked)
    found = load_run("runs/gemma-domains").domains
    assert found is not None
    largest = found.iloc[found["difference"].abs().argsort()[::-1][:6]]
    rows = "".join(
        f"| {row.layer}.{row.head} | {row.bos_mass_a:.3f} | {row.bos_mass_b:.3f} "
        f"| {row.difference:+.3f} [{row.low:+.3f}, {row.high:+.3f}] |\n"
        for row in largest.itertuples()
    )
    table = page.partition("| layer.head | prose | code | difference |")[2].partition("\n\n")[0]
    assert differences(rows, "\n".join(table.splitlines()[2:])) == []
    assert f"{(found['q'] < 0.05).sum()} of the {len(found)} heads differ" in page
