"""Attention maps of trigger models side by side (Ran-Milo 2603.11487, figs. 3-8): mean, deviation, single inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.figures.maps import CAPTION, Tile, draw_maps
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    import numpy as np

    from sinkscope.experiments.trigger.maps import TriggerMaps

SHOWN = {
    "mean": ("mean of A", "Mean over the evaluation sequences."),
    "deviation": ("standard deviation of A", "Standard deviation (1/n) over the evaluation sequences."),
    "single": ("A of one sequence", "Single evaluation sequences, one below the other."),
}
"""Every figure, with the name of its scale and the sentence of its caption."""


def draw_trigger_maps(
    models: list[TriggerMaps], figure: str, form: str, size: str = "column", title: str | None = None
) -> tuple[bytes, str]:
    """The models' maps side by side, a row for each layer; `figure`: one of SHOWN. Returns the figure and its caption.

    All models must have the same number of layers.
    """
    if figure == "single":
        count = min(len(each.single) for each in models)
        tiles = [row for number in range(count) for row in _rows(models, [each.single[number] for each in models])]
    else:
        found = [each.mean if figure == "mean" else each.deviation for each in models]
        tiles = _rows(models, found, marked=figure == "mean")
    label, said = SHOWN[figure]
    top = 1.0 if figure != "deviation" else 1e-12
    kinds = " beside ".join(dict.fromkeys(each.kind for each in models))
    content = draw_maps(tiles, f"sinkscope trigger maps, {figure}", form, size, title, label=label, top=top)
    return content, (
        f"{CAPTION.format(epsilon=EPSILON)} Dotted: the trigger's row. Models of the trigger-conditional task, "
        f"{kinds}; above each map its layer and head. {said}"
    )


def _rows(models: list[TriggerMaps], found: list[np.ndarray], marked: bool = True) -> list[list[Tile]]:
    """A row for each layer: all heads of the first model, then those of the next."""
    several = len({each.kind for each in models}) > 1
    names = [f"{each.kind} " if several else "" for each in models]
    return [
        [
            Tile(f"{name}{layer}.{head}", weights[layer, head], (), model.trigger, marked)
            for name, model, weights in zip(names, models, found, strict=True)
            for head in range(weights.shape[1])
        ]
        for layer in range(found[0].shape[0])
    ]


def captions(drawn: dict[str, str]) -> str:
    """A Markdown page with the caption of every file."""
    parts = [f"## {file}\n\n{caption}\n" for file, caption in drawn.items()]
    return "\n".join(["# Attention maps of trigger models\n", *parts])
