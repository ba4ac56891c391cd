"""What the mask alone tells is found once for all layers that share it, and each layer has it for itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from models import random_ids, tiny

import sinkscope
from sinkscope.capture.view import LayerView, Missing, once_per_mask
from sinkscope.metrics import mass

LAYERS = 3


@pytest.mark.parametrize(
    ("family", "masks"), [("llama", 1), pytest.param("gemma3", 2, marks=pytest.mark.slow)]
)  # its sliding and its full layers
def test_it_is_asked_once_for_each_mask(family: str, masks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    plain = mass.ranked
    monkeypatch.setattr(mass, "ranked", lambda seen_by: asked.append(seen_by) or plain(seen_by))
    model = tiny(family)
    assert model.config.num_hidden_layers >= LAYERS
    sinkscope.scan(model, data=random_ids(2, 70), self_check=False, batch_size=2)
    assert len(asked) == masks


def layer_of(of_mask: dict[Any, Any], heads: int) -> LayerView:
    """A view of two sequences that has nothing else."""

    class Layer(LayerView):
        def __init__(self) -> None:
            vars(self)["attention"] = SimpleNamespace(of_mask=of_mask)

    Layer.batch, Layer.heads = 2, heads  # type: ignore[misc, assignment]
    return Layer()


def test_a_layer_that_changes_its_own_leaves_the_others_theirs() -> None:
    told: list[Any] = []

    @once_per_mask
    def ones(view: Any) -> torch.Tensor:
        told.append(view)
        return torch.ones(view.batch, view.heads)

    @once_per_mask
    def nothing(view: Any) -> torch.Tensor:
        told.append(view)
        raise Missing

    of_mask: dict[Any, Any] = {}
    layers = [layer_of(of_mask, heads) for heads in (3, 3, 4)]
    for layer in layers:
        own = ones(layer)
        assert own.shape == (2, layer.heads)
        assert bool((own == 1).all())
        own.mul_(2)
        with pytest.raises(Missing):
            nothing(layer)
    assert told == [layers[0], layers[0], layers[2], layers[2]]
