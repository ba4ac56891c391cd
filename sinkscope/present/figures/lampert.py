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
        "Its caption breaks off in what we have (\"all other 256 token embeddings at the input to the\"), so that "
        "before or after the input norm is not known: both are drawn. How it summarises positions: ours are the "
        "median, the 5 to 95 % band and the range.",
    ),
    Planned(
        "2, 4, 5, 6, 7", "cosine",
        "Figure 2 shows, by its caption, empirical and theoretical cosines of X and X + WZ over models and context "
        "lengths, and of LLaMA3-8B the parts of the attention step over all heads and over those whose uniformity "
        "(their equation 12) is above 0.6; figure 7 the absolute difference of empirical and theoretical. Here all "
        "quantities are drawn for every run at its own length, and neither the uniform heads alone nor the "
        "difference. The dashed theory is eq. 2 as we reconstructed it.",
    ),
    Planned(
        "3", "costs",
        "By its caption the squared Frobenius cost of a whole transformer block whose pattern is a sink or a "
        "diagonal. Ours is of queries and keys alone, as bounds for the heads of a trained model.",
    ),
    Planned(
        "8, 9, 10", "smoothing",
        "By their captions each head at a context of 512, coloured by the condition: so is ours, at the run's "
        "length. The denominator of figure 10: ours is the cosine under identity.",
    ),
    Planned(
        "11", None,
        "By its caption the empirical average cosine similarity for selected heads; which heads, and of what, is "
        "not known. Nothing is drawn for it.",
    ),
    Planned(
        "12", "ranks",
        "By its caption distributions of ranks across layers, pooled over heads, 50 sequences and 4 datasets. Which "
        "rank, and whether means are subtracted first: ours is the stable rank, and subtracts none.",
    ),
    Planned(
        "13", "gallery",
        "By its caption attention patterns taken randomly from a pool; its lengths and texts are not known. Ours "
        "are not random: the heads with the largest mean attention on the first token, on themselves, on the token "
        "before, and the most uniform one.",
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
