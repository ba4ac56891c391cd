"""How papers write a column: mathematics that both LaTeX and matplotlib set, else its name in words."""

from __future__ import annotations

from sinkscope.runs.words import FIRST_MASS

MATHEMATICS = {
    "sink_score": r"$\alpha_0$",
    "entropy": "$H$",
    "honor": "HONOR",
    "cos_first_residual": r"$\cos(x_0, x_j)$",
    "norm_ratio": r"$\|x_0\| / \|x_j\|$",
    "norm_first": r"$\|x_0\|$",
    "norm_other": r"$\|x_j\|$",
    "inf_norm": r"$\|x\|_\infty$",
    "max_abs": r"$\max |x|$",
}
"""By column; a layer's mean of a head metric is written as the metric is."""


def mathematics(name: str) -> str | None:
    """The column as mathematics; None where papers write it in words."""
    return MATHEMATICS.get(name.removeprefix("mean_"))


def in_words(name: str, first_mass: str) -> str:
    """The column's name in words, not escaped. `first_mass`: what attention on the first token is called in the run
    (`sinkscope.runs.words.first_mass`)."""
    return first_mass if name.removeprefix("mean_") == FIRST_MASS else name.replace("_", " ")
