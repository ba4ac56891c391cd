"""Pictures of several sizes in one batch: in patches that a processor cut (SigLIP 2), and in one row (Pixtral)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from maps import columns
from tiers import slow_but
from torch import Tensor

import sinkscope
from sinkscope.checkpoints.forward import eager

SHAPES = torch.tensor([[4, 4], [2, 5], [3, 3]])
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 4,
}  # fmt: skip


def siglip() -> Any:
    torch.manual_seed(0)
    config = transformers.Siglip2VisionConfig(num_patches=16, **SIZES)
    return transformers.Siglip2VisionModel(config).eval()


def patches(padded: int = 20) -> dict[str, Tensor]:
    """What its processor returns: patches padded on the right, their mask, and how many are down and across."""
    mask = (torch.arange(padded) < SHAPES.prod(1)[:, None]).int()
    values = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(1))[:, :padded] * mask[..., None]
    return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": SHAPES}


def pixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.PixtralVisionConfig(image_size=32, head_dim=8, **SIZES)
    return transformers.PixtralVisionModel(config).eval()


def assert_maps(run: Any, model: Any, alone: list[dict[str, Tensor]]) -> None:
    """Every sequence's masses are those of the model's own eager maps of this picture alone."""
    for number, one in enumerate(alone):
        with torch.no_grad(), eager(model):
            maps = model(**one, output_attentions=True).attentions
        for layer, each in enumerate(maps):
            table = run.sequences.dropna(subset="head").query(f"sequence == {number} and layer == {layer}")
            for name, values in columns(each[0].double()).items():
                np.testing.assert_allclose(table.sort_values("head")[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("masked", slow_but([True, False], False))
def test_patches_of_pictures_of_several_sizes_are_read(masked: bool) -> None:
    model, given = siglip(), patches()
    if not masked:
        del given["pixel_attention_mask"]
    run = sinkscope.scan(model, data=given)
    assert run.manifest.self_check.status == "passed"
    alone = [
        {
            "pixel_values": given["pixel_values"][row : row + 1, : int(sizes.prod())],
            "pixel_attention_mask": torch.ones(1, int(sizes.prod())),
            "spatial_shapes": sizes[None],
        }
        for row, sizes in enumerate(SHAPES)
    ]
    assert_maps(run, model, alone)
    data = run.manifest.data[0]
    assert (data.sequences, data.seq_len, data.shortest) == (3, 16, 9)
    assert set(run.heads["stream"]) == {"vision"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pixel_values": torch.zeros(3, 3, 16, 16)}, r"numbers of shape \[picture, patch, number\] are needed"),
        ({"spatial_shapes": torch.tensor([[5, 5], [2, 5], [3, 3]])}, "pictures of 2 to 20 patches are needed"),
        ({"spatial_shapes": torch.tensor([[4, 3], [2, 5], [3, 3]])}, "shows other patches than spatial_shapes counts"),
        ({"spatial_shapes": torch.tensor([[4, 4]])}, r"beside spatial_shapes \[picture, 2\]"),
    ],
)
def test_patches_that_do_not_fit_are_refused(change: dict[str, Tensor], words: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(siglip(), data=patches() | change)


def test_padding_of_patches_beside_text_counts_nowhere() -> None:
    torch.manual_seed(0)
    text = {name: value for name, value in SIZES.items() if name != "patch_size"}
    config = transformers.Siglip2Config(
        text_config={**text, "vocab_size": 60, "max_position_embeddings": 16, "projection_size": 32},
        vision_config={**SIZES, "num_patches": 16},
    )
    model, ids = transformers.Siglip2Model(config).eval(), torch.randint(3, 60, (3, 8))
    runs = [sinkscope.scan(model, data={"input_ids": ids} | patches(padded)) for padded in (16, 20)]
    for name in ("bos_mass", "entropy", "honor"):
        np.testing.assert_array_equal(runs[0].heads[name], runs[1].heads[name])
    vision = runs[0].sequences.query("stream == 'vision' and layer == 0 and head == 0")
    assert len(vision) == 3


def test_pictures_in_one_row_are_read_one_by_one() -> None:
    """Pixtral attends over the patches of all pictures at once, each to its own."""
    model, pixels = pixtral(), torch.randn(3, 3, 16, 24, generator=torch.Generator().manual_seed(1))
    run = sinkscope.scan(model, data={"pixel_values": pixels})
    assert run.manifest.batch_size == 1
    assert_maps(run, model, [{"pixel_values": pixels[row : row + 1]} for row in range(3)])
