"""The study's figures, where matplotlib is installed (`pip install 'sinkscope[figures]'`)."""

from __future__ import annotations

import io
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from jaxtyping import Float
    from torch import Tensor

    from sinkscope.experiments.trigger.reproduce import Trained


def available() -> bool:
    return find_spec("matplotlib") is not None


def draw_study(study: list[Trained], curve: pd.DataFrame) -> dict[str, bytes]:
    """PNG files by name: forced_mass.png, and attention-MODEL.png for each model."""
    maps = {
        f"attention-{trained.recipe.name}.png": attention(trained.evaluation.maps, trained.recipe.name)
        for trained in study
    }
    return {"forced_mass.png": forced_mass(curve)} | maps


def attention(maps: Float[Tensor, "layer head query key"], title: str) -> bytes:
    """A panel a head: mean attention, queries down, keys across. The colour scale is 0 to 1, or to the largest A."""
    from matplotlib.figure import Figure

    layers, heads = maps.shape[:2]
    figure = Figure(figsize=(0.8 + 2.2 * heads, 0.9 + 2.2 * layers), layout="constrained")
    panels = figure.subplots(layers, heads, squeeze=False)
    top = max(1.0, float(maps.max()))
    for layer in range(layers):
        for head in range(heads):
            panel = panels[layer][head]
            image = panel.imshow(maps[layer, head].numpy(), vmin=0, vmax=top, cmap="viridis")
            panel.set_title(f"layer {layer}, head {head}", fontsize=8)
            panel.tick_params(labelsize=6)
    figure.supxlabel("key t", fontsize=8)
    figure.supylabel("query i", fontsize=8)
    figure.suptitle(title, fontsize=9)
    figure.colorbar(image, ax=panels, shrink=0.8).set_label("A[i,t], mean over sequences", fontsize=8)
    return _png(figure)


def forced_mass(curve: pd.DataFrame) -> bytes:
    """Loss and largest error against the BOS mass forced on every non-trigger row; the paper's criterion as a line."""
    from matplotlib.figure import Figure

    kept = curve[curve["mass"] < 1]
    figure = Figure(figsize=(5, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.plot(1 - kept["mass"], kept["error"], marker="o", label="largest absolute error")
    axes.plot(1 - kept["mass"], kept["loss"], marker="s", label="mean squared error")
    axes.axhline(5e-3, color="grey", linestyle="--", linewidth=1, label="criterion: error < 0.005")
    axes.set(xscale="log", yscale="log", xlabel="mass off BOS in non-trigger rows", ylabel="error of the best read-out")
    axes.legend(fontsize=8)
    return _png(figure)


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, metadata={"Software": None})
    return buffer.getvalue()
