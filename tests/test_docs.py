"""README and docs/: links and anchors lead somewhere, README stays short, and every command they show can be typed."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pandas as pd
import pytest
from conftest import command_of
from pages import commands, differences
from typer.testing import CliRunner

from sinkscope import __version__
from sinkscope.cli import app
from sinkscope.present.paper.formats.bibtex import bibtex
from sinkscope.runs.catalogue import catalogue
from sinkscope.runs.paper_table import PaperTable

ROOT = Path(__file__).parents[1]
SHOWN = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]
PAGES = [*SHOWN, *sorted(ROOT.glob("examples/*.md"))]
PAGES += [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md"]
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def anchors(page: Path) -> set[str]:
    """The anchors that a forge gives a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text("utf-8")), re.M)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


def broken(page: Path) -> list[str]:
    """Links of a page to a file or an anchor that is not there, or to a folder, which the site has no page for."""
    wrong = []
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_link_and_anchor_exists(page: Path) -> None:
    assert broken(page) == []


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    links = "[a](#one-b_c-two) [b](#three) [c](gone.md) [d](page.md#no) [e](https://x.org) [f](.)"
    page.write_text(f"# One `b_c`: two\n{links}\n")
    assert broken(page) == ["#three", "gone.md", "page.md#no", "."]


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_every_page_is_listed() -> None:
    index = ROOT / "docs" / "index.md"
    listed = {(index.parent / link).resolve() for link in LINK.findall(index.read_text("utf-8"))}
    assert set(ROOT.glob("docs/**/*.md")) - {index} <= listed


# Commands


def typed(page: Path) -> list[str]:
    """What follows `sinkscope` in every command line of the page's code blocks."""
    lines = "\n".join(FENCE.findall(page.read_text("utf-8"))).replace("\\\n", " ").split("\n")
    starts = [re.match(r"(?:.*(?:&&|-m) )?sinkscope (\w.*)", line) for line in lines]
    return [found[1] for found in starts if found]


def named(page: Path) -> list[str]:
    """What follows `sinkscope` where a sentence names a command: a name and options, perhaps not all it needs."""
    text = FENCE.sub("", page.read_text("utf-8"))
    return [" ".join(found.split()) for found in re.findall(r"`sinkscope\s+([a-z][^`]*)`", text)]


def words_of(line: str) -> list[str]:
    """The words that the command gets of a shell: without comment, redirection and what follows."""
    words = shlex.split(line, comments=True)
    end = next((place for place, word in enumerate(words) if word in {">", "|", "&&"}), len(words))
    return words[:end]


def unknown(words: list[str]) -> list[str]:
    """The command, subcommand or options among the words that sinkscope does not have."""
    command = command_of(app)
    while hasattr(command, "commands") and words and re.fullmatch(r"[a-z0-9]+", words[0]):
        if words[0] not in command.commands:
            return words[:1]
        command, words = command.commands[words[0]], words[1:]
    options = {option for parameter in command.params for option in parameter.opts} | {"--help", "-h"}
    if "--" in words:  # what follows is a program's own
        words = words[: words.index("--")]
    return [word for word in words if word.startswith("-") and word.partition("=")[0] not in options]


def refusal(words: list[str]) -> str:
    """What the parser says against the words, empty where it takes them. No command is run."""
    command, context = command_of(app), None
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    try:
        context = command.make_context("sinkscope", list(words))
    except SystemExit as refused:
        return f"exit code {refused.code}"
    return "" if context else "nothing parsed"


@pytest.mark.parametrize("page", SHOWN, ids=name)
def test_every_command_can_be_typed(page: Path) -> None:
    lines = [words_of(line) for line in typed(page)]
    assert [(words, wrong) for words in lines if (wrong := unknown(words) or refusal(words))] == []
    assert [line for line in named(page) if unknown(line.split())] == []


def test_commands_are_found_and_judged() -> None:
    assert len(typed(ROOT / "docs" / "commands" / "scan.md")) >= 7
    assert len(typed(ROOT / "docs" / "many-gpus.md")) == 6
    assert unknown(["scam", "x"]) == ["scam"]
    assert unknown(["trigger", "trian"]) == ["trian"]
    assert unknown(["scan", "x", "--sequences", "3"]) == ["--sequences"]
    assert refusal(["scan", "x", "--num-sequences", "many"])
    assert refusal(["check", "x"]), "an option that is needed is missing"


def test_every_command_has_its_page() -> None:
    """In README's table; the pages it links to exist by the test of links."""
    helped = CliRunner().invoke(app, ["--help"]).stdout
    commands = re.findall(r"^  ([a-z]+)  ", helped.partition("Commands:")[2], re.M)
    table = "".join(
        re.findall(
            r"^\| (\[.+?\]\(docs/(?:commands/)?\w+\.md(?:#[\w-]+)?\)) \|", (ROOT / "README.md").read_text("utf-8"), re.M
        )
    )
    assert len(commands) == 23
    assert set(commands) <= set(re.findall(r"\w+", table))


# Pages written from the source


def written() -> dict[Path, str]:
    found = spec_from_file_location("write_pages", ROOT / "docs" / "write_pages.py")
    assert found is not None
    assert found.loader is not None
    module = module_from_spec(found)
    found.loader.exec_module(module)
    return dict(module.pages())


def test_generated_pages_are_what_the_source_says() -> None:
    for page, text in written().items():
        assert page.read_text("utf-8") == text, "run: python docs/write_pages.py"


def test_every_metric_has_the_address_that_the_command_prints() -> None:
    there = anchors(ROOT / "docs" / "metrics.md")
    printed = re.findall(r"Address: docs/metrics\.md#(\S+)", CliRunner().invoke(app, ["metrics"]).stdout)
    assert len(printed) == len(set(printed)) == sum(column.shown for column in catalogue())
    assert set(printed) <= there


def test_the_citation_is_that_of_the_package_and_of_the_bibliography() -> None:
    citation = (ROOT / "CITATION.cff").read_text("utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    cited = dict(re.findall(r'^(?:  - )?(\w+): "?(.*?)"?$', citation, re.M))
    assert cited["version"] == __version__
    assert (cited["license"], cited["name"]) == (project["license"], project["authors"][0]["name"])
    entry = bibtex(PaperTable([], [], pd.DataFrame(), []))
    assert f"title = {{{cited['title']}}}" in entry
    assert f"author = {{{{{cited['name']}}}}}" in entry


# Pages as they are typed


@pytest.mark.parametrize("page", [*SHOWN, *sorted(ROOT.glob("examples/*.md"))], ids=name)
def test_no_two_commands_of_a_page_write_the_same_folder(page: Path) -> None:
    """The second would be refused."""
    written = [command.writes for command in commands(page.read_text("utf-8")) if command.run and command.writes]
    assert len(written) == len(set(written)), written


def test_commands_that_write_the_same_are_seen() -> None:
    text = "```\nsinkscope scan x --out a\nsinkscope scan y --out a --force\nsinkscope trigger train --out a\n```\n"
    assert [command.writes for command in commands(text)] == ["a", None, "a"]


def test_marks_and_answers_are_read() -> None:
    text = "```\nsinkscope scan x --json > a.json\nsinkscope scan y  # needs the model hub\nsinkscope scan MODEL\n```\n"
    assert [(command.into, command.run) for command in commands(text)] == [
        ("a.json", True),
        (None, False),
        (None, False),
    ]
    assert differences("mass 0.38 of 72 heads, 1.039e+05", "mass 0.37 of 72") == []
    assert differences("mass 0.38 of 71 heads", "mass 0.34 of 72 heads") == [("0.38", "0.34"), ("71", "72")]
    assert differences("mass", "mass of") == [("", "of")]


def test_the_first_screen_of_the_readme_answers_and_runs() -> None:
    """What it is, the picture, one line that installs and runs, and the answer, before anything else is asked."""
    screen = (ROOT / "README.md").read_text("utf-8").splitlines()[:45]
    text = "\n".join(screen)
    places = [text.index(part) for part in ("measures attention sinks", "![", "&& sinkscope scan", "Attention sink: ")]
    assert places == sorted(places)
    assert text.count("pip install") == 1, "the other ways stand on their page"
