"""The figures of Lampert et al. 2605.08453, 1 to 13: which of ours stands for which, and what could not be read."""

from __future__ import annotations

from dataclasses import dataclass

from sinkscope.present.figures.maps import CLASSES

PAPER = "Lampert et al. 2605.08453"


@dataclass(frozen=True)
class Planned:
    """Figures of the paper by their numbers, and `figure` of ours that stands for them.

    `unread`: what of the paper's figures could not be read from the source, so that ours may differ. `side`: which part
    of the paper's figure is meant, where ours stands for one. `pick`: which heads a gallery shows.
    """

    numbers: str
    figure: str
    unread: str
    side: str = ""
    pick: str = ""

    @property
    def stem(self) -> str:
        """Name of the file, without its ending."""
        numbers = (f"{part:>02}" for part in self.numbers.split(", ") if part)
        return "-".join(["lampert", *numbers, self.figure, *([self.pick.replace("+", "-and-")] if self.pick else [])])

    @property
    def heading(self) -> str:
        """What it is called above its caption."""
        if not self.numbers:
            return "Beside the paper"
        side, pick = f", {self.side}" if self.side else "", f", {self.pick}" if "+" in self.pick else ""
        return f"Figure{'s' if ',' in self.numbers else ''} {self.numbers}{side}{pick}"


PLAN = (
    Planned(
        "1", "alignment",
        "Its caption breaks off in what we have (\"all other 256 token embeddings at the input to the\"), so that "
        "before or after the input norm is not known: both are drawn. How it summarises positions: ours are the "
        "median, the 5 to 95 % band and the range.",
    ),
    Planned(
        "2, 4, 5, 6", "cosine",
        "Figure 2 shows, by its caption, empirical and theoretical cosines of X and X + WZ over models and context "
        "lengths. Here all quantities are drawn for every run at its own length. The dashed theory is eq. 2 as we "
        "reconstructed it.",
    ),
    Planned(
        "2", "parts",
        "By its caption the parts of the attention step of LLaMA3-8B, over all heads and over those whose uniformity "
        "(their equation 12) is above 0.6. Which parts, is not known; their uniformity could not be read, and ours is "
        "an entropy.",
        side="right",
    ),
    Planned(
        "3", "costs",
        "By its caption the squared Frobenius cost of a whole transformer block whose pattern is a sink or a "
        "diagonal. Ours is of queries and keys alone, as bounds for the heads of a trained model.",
    ),
    Planned(
        "7", "theory",
        "By its caption the absolute difference between empirical and theoretical; over what it is averaged, is not "
        "known.",
    ),
    Planned(
        "8, 9, 10", "smoothing",
        "By their captions each head at a context of 512, coloured by the condition: so is ours, at the run's "
        "length. The denominator of figure 10: ours is the cosine under identity.",
    ),
    Planned(
        "11", "selected",
        "By its caption the empirical average cosine similarity for selected heads. Which heads, and of what, is not "
        "known: ours are chosen by a rule of ours, and show the cosine under three mixes.",
    ),
    Planned(
        "12", "ranks",
        "By its caption distributions of ranks across layers, pooled over heads, 50 sequences and 4 datasets. Which "
        "rank, and whether means are subtracted first: ours is the stable rank, and subtracts none. Each dataset has a "
        "panel of its own.",
    ),
    Planned(
        "13", "gallery",
        "By its caption attention patterns taken randomly from a pool; the pool, its lengths and texts are not known. "
        "Ours are four heads of each run.",
        pick="random",
    ),
    *(
        Planned(
            "E.3", "gallery",
            "It shows heads that follow the patterns of section 7; by which rule they were found, is not known. Ours "
            "have most rows of the two kinds of the column row_pattern, whose thresholds are ours.",
            pick=pick,
        )
        for pick in CLASSES
    ),
    Planned(
        "", "switch",
        "No figure of theirs: the measurement of their claim that a sink is a switch, in pretrained models.",
    ),
)  # fmt: skip
"""Every figure of the paper, in the order of its first number; at last one that the paper lacks."""


def captions(drawn: dict[str, str], refused: dict[str, str]) -> str:
    """A Markdown page about the figures of one folder: caption and file of each, what was not drawn, and why.

    `drawn`: caption by file name; `refused`: reason by the stem of what was to be drawn.
    """
    lines = [f"# The figures of {PAPER}, drawn from these runs", ""]
    for figure in PLAN:
        file = next((name for name in drawn if name.rpartition(".")[0] == figure.stem), None)
        shown = drawn[file] if file else f"Not drawn: {refused.get(figure.stem, 'not asked for')}."
        lines += [f"## {figure.heading}{f': {file}' if file else ''}", "", shown, "", f"Not read: {figure.unread}", ""]
    return "\n".join(lines)
