"""The figures of the trigger study."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sinkscope.present.colors import LINES, MAP
from sinkscope.present.figures.canvas import drawn
from sinkscope.present.figures.maps import CAPTION, Tile, draw_maps
from sinkscope.runs.defaults import EPSILON

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from jaxtyping import Float
    from matplotlib.figure import Figure
    from torch import Tensor

    from sinkscope.trigger.evaluation import TriggerMaps
    from sinkscope.trigger.reproduce import Trained


def draw_study(study: list[Trained], curve: pd.DataFrame) -> dict[str, bytes]:
    """PNG files by name: forced_mass.png, and attention-MODEL.png for each model."""
    maps = {
        f"attention-{trained.recipe.name}.png": attention(trained.evaluation.maps, trained.recipe.name)
        for trained in study
    }
    return {"forced_mass.png": forced_mass(curve)} | maps


def attention(maps: Float[Tensor, "layer head query key"], name: str) -> bytes:
    """One panel per head: mean attention, queries down, keys across. Colours run from 0 to 1, or to a larger A."""
    layers, heads = maps.shape[:2]
    top = max(1.0, float(maps.max()))

    def paint(canvas: Figure) -> None:
        panels = canvas.subplots(layers, heads, squeeze=False)
        for layer in range(layers):
            for head in range(heads):
                panel = panels[layer][head]
                image = panel.imshow(maps[layer, head].numpy(), vmin=0, vmax=top, cmap=MAP)
                panel.set_title(f"layer {layer}, head {head}")
        canvas.supxlabel("key t")
        canvas.supylabel("query i")
        canvas.suptitle(name)
        canvas.colorbar(image, ax=panels, shrink=0.8, label="A[i,t], mean over sequences")

    size = (0.8 + 2.2 * heads, 0.9 + 2.2 * layers)
    return drawn(paint, f"sinkscope trigger study, mean attention of {name}", "png", size)


def trajectory(table: pd.DataFrame, name: str) -> bytes:
    """Mean BOS mass of every head over training above the model's largest error, steps on a logarithmic axis.

    `table`: trajectory.csv. Step 0, the untrained model, stands at 0.5, because a logarithm has no place for it.
    """
    models = table.drop_duplicates("step")

    def paint(canvas: Figure) -> None:
        above, below = canvas.subplots(2, 1, sharex=True)
        for number, ((layer, head), rows) in enumerate(table.groupby(["layer", "head"])):
            above.plot(
                rows["step"].clip(lower=0.5), rows["bos_mean"], color=LINES[number % len(LINES)], marker="o",
                markersize=3, label=f"layer {layer}, head {head}",
            )  # fmt: skip
        above.axhline(0.9, color="grey", linestyle="--", linewidth=1)
        top = max(1.0, float(table["bos_mean"].max()))
        above.set(ylabel="A[i,0], rows without trigger", title=name, ylim=(-0.05, 1.05 * top))
        if len(table) <= len(LINES) * len(models):
            above.legend()
        below.plot(models["step"].clip(lower=0.5), models["error"], color=LINES[0], marker="o", markersize=3)
        below.axhline(5e-3, color="grey", linestyle="--", linewidth=1)
        below.set(xscale="log", yscale="log", xlabel="training step", ylabel="largest error")

    return drawn(paint, f"sinkscope trigger study, sink of {name} over training", "png", (5, 4.4))


def forced_mass(curve: pd.DataFrame) -> bytes:
    """Loss and largest error against the BOS mass forced on every non-trigger row, with the paper's criterion."""
    kept = curve[curve["mass"] < 1]

    def paint(canvas: Figure) -> None:
        axes = canvas.subplots()
        axes.plot(1 - kept["mass"], kept["error"], color=LINES[0], marker="o", label="largest absolute error")
        axes.plot(1 - kept["mass"], kept["loss"], color=LINES[1], marker="s", label="mean squared error")
        axes.axhline(5e-3, color="grey", linestyle="--", linewidth=1, label="criterion: error < 0.005")
        axes.set(xscale="log", yscale="log", xlabel="mass off BOS in non-trigger rows")
        axes.set_ylabel("error of the best read-out")
        axes.legend()

    return drawn(paint, "sinkscope trigger study, error by forced BOS mass", "png", (5, 3.4))


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
        count = min(len(model.single) for model in models)
        tiles = [row for number in range(count) for row in _rows(models, [model.single[number] for model in models])]
    else:
        maps = [model.mean if figure == "mean" else model.deviation for model in models]
        tiles = _rows(models, maps, marked=figure == "mean")
    label, said = SHOWN[figure]
    top = 1.0 if figure != "deviation" else 1e-12
    kinds = " beside ".join(dict.fromkeys(model.kind for model in models))
    content = draw_maps(tiles, f"sinkscope trigger maps, {figure}", form, size, title, label=label, top=top)
    return content, (
        f"{CAPTION.format(epsilon=EPSILON)} Dotted: the trigger's row. Models of the trigger-conditional task, "
        f"{kinds}; above each map its layer and head. {said}"
    )


def _rows(models: list[TriggerMaps], points: list[np.ndarray], marked: bool = True) -> list[list[Tile]]:
    """A row for each layer: all heads of the first model, then those of the next."""
    several = len({model.kind for model in models}) > 1
    names = [f"{model.kind} " if several else "" for model in models]
    return [
        [
            Tile(f"{name}{layer}.{head}", weights[layer, head], (), model.trigger, marked)
            for name, model, weights in zip(names, models, points, strict=True)
            for head in range(weights.shape[1])
        ]
        for layer in range(points[0].shape[0])
    ]


def captions(drawn: dict[str, str]) -> str:
    """A Markdown page with the caption of every file."""
    parts = [f"## {file}\n\n{caption}\n" for file, caption in drawn.items()]
    return "\n".join(["# Attention maps of trigger models\n", *parts])
