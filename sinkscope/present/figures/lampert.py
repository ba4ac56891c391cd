"""The figures of Lampert et al. 2605.08453, 1 to 13: which of ours stands for which, and what could not be read."""

from __future__ import annotations

from dataclasses import dataclass

PAPER = "Lampert et al. 2605.08453"


@dataclass(frozen=True)
class Planned:
    """Figures of the paper by their numbers; `figure` of ours that stands for them, None where none does.

    `unread`: what of the paper's figures could not be read from the source, so that ours may differ.
    """

    numbers: str
    figure: str | None
    unread: str

    @property
    def stem(self) -> str:
        """Name of the file, without its ending."""
        return "-".join(["lampert", *(f"{part:>02}" for part in self.numbers.split(", ") if part), self.figure or ""])


PLAN = (
    Planned(
        "1", "alignment",
        "Whether its embeddings are taken before or after the input norm: both are drawn. The positions it shows and "
        "how it summarises them: ours are the median, the 5 to 95 % band and the range.",
    ),
    Planned(
        "2, 4, 5, 6, 7", "cosine",
        "Which quantity, model and length each number shows: all quantities are drawn for every run, at the run's "
        "length. The dashed theory is eq. 2 as we reconstructed it.",
    ),
    Planned(
        "3", "costs",
        "Its axes. The constants of its bounds are those of section 7; kappa, C, r and Delta are read as `sinkscope "
        "metrics` says.",
    ),
    Planned(
        "8, 9, 10", "smoothing",
        "The denominator of figure 10: ours is the cosine under identity. Whether a mark is a head or a layer: ours "
        "is a head.",
    ),
    Planned("11", None, "What it shows: nothing of it could be read, and nothing is drawn for it."),
    Planned("12", "ranks", "Whether means are subtracted before the rank is taken: ours subtracts none."),
    Planned(
        "13", "gallery",
        "Its heads, lengths and texts: ours are the heads with the largest mean attention on the first token, on "
        "themselves, on the token before, and the most uniform one.",
    ),
    Planned(
        "", "switch",
        "No figure of theirs: the measurement of their claim that a sink is a switch, in pretrained models.",
    ),
)  # fmt: skip
"""Every figure of the paper, in the order of its first number; at last one that the paper lacks."""


def captions(drawn: dict[str, str], refused: dict[str, str]) -> str:
    """A Markdown page about the figures of one folder: caption and file of each, what was not drawn, and why.

    `drawn`: caption by file name; `refused`: reason by our figure's name.
    """
    lines = [f"# The figures of {PAPER}, drawn from these runs", ""]
    for each in PLAN:
        heading = f"Figure {each.numbers}" if each.numbers else "Beside the paper"
        file = next((name for name in drawn if name.rpartition(".")[0] == each.stem), None)
        shown = drawn[file] if file else f"Not drawn: {refused.get(each.figure or '', 'see below')}."
        lines += [f"## {heading}{f': {file}' if file else ''}", "", shown, "", f"Not read: {each.unread}", ""]
    return "\n".join(lines)
