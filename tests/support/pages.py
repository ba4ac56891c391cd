"""What README and docs/ tell a reader to type: the commands of a page in order, and the answers printed there."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("examples/*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.M | re.S)
LINE = re.compile(r"(?:.*(?:&&|-m) )?sinkscope (\w.*)")
NOT_RUN = re.compile(r"# (needs|takes) \w+.*$")
"""The mark of a command that the tests do not run, as its reader sees it: `# needs the model hub`."""
PLACEHOLDER = re.compile(r"\b(MODEL|RUN|FILE|FOLDER|ADDRESS)\b")


@dataclass(frozen=True)
class Command:
    """One command line.

    Attributes:
        words: what follows `sinkscope`, without comment and redirection.
        into: the file that its answer is written into by `>`; None where it is printed.
        run: whether the tests run it: neither a mark nor a placeholder says otherwise.
    """

    words: tuple[str, ...]
    into: str | None
    run: bool

    @property
    def writes(self) -> str | None:
        """The folder or file that it writes and would not write twice."""
        if {"--force", "--resume"} & set(self.words):
            return None
        named = [word for before, word in zip(self.words, self.words[1:], strict=False) if before == "--out"]
        return named[0] if named else self.words[1] if self.words[0] == "scan" else None


def commands(text: str) -> list[Command]:
    """Every command of a page's code blocks, in order."""
    lines = "\n".join(block for _, block in FENCE.findall(text)).replace("\\\n", " ").split("\n")
    return [_command(found[1]) for line in lines if (found := LINE.match(line))]


def _command(line: str) -> Command:
    words = shlex.split(line, comments=True)
    into = words[words.index(">") + 1] if ">" in words else None
    end = next((place for place, word in enumerate(words) if word in {">", "|", "&&"}), len(words))
    return Command(tuple(words[:end]), into, not (NOT_RUN.search(line) or PLACEHOLDER.search(line)))


def python_blocks(text: str) -> list[str]:
    """The Python code of a page, in order."""
    return [block for language, block in FENCE.findall(text) if language == "python"]


def answer(text: str, beginning: str) -> str:
    """The block of a page that starts with these words."""
    (found,) = [block for _, block in FENCE.findall(text) if block.startswith(beginning)]
    return str(found)


NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def differences(printed: str, shown: str) -> list[tuple[str, str]]:
    """Words that differ between a command's answer and the page, which may end earlier. Numbers may differ by two in
    the last digit that the page shows: sums are taken in another order where there are other threads."""
    pairs = list(zip(printed.split(), shown.split(), strict=False))
    short = [("", word) for word in shown.split()[len(pairs) :]]
    return [(a, b) for a, b in pairs if not _same(a, b)] + short


def _same(printed: str, shown: str) -> bool:
    if NUMBER.sub("#", printed) != NUMBER.sub("#", shown):
        return False
    numbers = zip(NUMBER.findall(printed), NUMBER.findall(shown), strict=True)
    return all(abs(float(a) - float(b)) <= 2.01 * _last_digit(b) for a, b in numbers)


def _last_digit(number: str) -> float:
    """What one step of the last digit is worth: 0.01 for 0.37, 100 for 1.038e+05; 0 for a whole number, a count."""
    digits, _, power = number.partition("e")
    places = len(digits.partition(".")[2])
    return 10.0 ** (int(power or 0) - places) if places else 0.0
