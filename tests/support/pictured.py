"""Tiny random vision-language models, and inputs as their processors would make them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from families import tiny_config
from torch import Tensor
from transformers import AutoModelForImageTextToText, __version__

IMAGE, LENGTH, FIRST = 5, 24, 3

with_image_processors = pytest.mark.skipif(
    __version__.startswith("5.17.") and find_spec("torchvision") is None,
    reason="transformers 5.17 loads no image processor without torchvision",
)

IMAGE_TOKENS = {"gemma3": 4, "llava": 16, "qwen2_5_vl": 4, "qwen3_vl": 4}

OTHERS = {"video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8, "boi_token_index": 7}

QWEN_VISION = {
    **{"depth": 2, "out_hidden_size": 32, "num_heads": 4, "temporal_patch_size": 2, "in_channels": 3},
    **{"spatial_merge_size": 2, "patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
    **{"deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}


def see(family: str, implementation: str | None = None, image: int = IMAGE, vocabulary: int = 99) -> Any:
    """A tiny random model of that family in eval mode; its picture's tokens have the id `image`."""
    config = tiny_config(family)
    for name, value in {"image_token_id": image, "image_token_index": image, **OTHERS}.items():
        if hasattr(config, name):
            setattr(config, name, value)
    config.text_config.vocab_size = vocabulary
    if family == "gemma3":
        config.mm_tokens_per_image = IMAGE_TOKENS[family]
    if family.startswith("qwen"):
        for name, value in QWEN_VISION.items():
            if hasattr(config.vision_config, name):
                setattr(config.vision_config, name, value)
        rotation = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}
        config.text_config.rope_parameters = rotation
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32, **chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


def inputs(family: str, sequences: int = 2, grid: int = 4) -> dict[str, Tensor]:
    """What the family's processor would return for sequences of 24 tokens with a picture in each."""
    generator = torch.Generator().manual_seed(0)
    count = grid * grid // 4 if family.startswith("qwen") else IMAGE_TOKENS[family]
    ids = torch.randint(10, 99, (sequences, LENGTH), generator=generator)
    ids[:, FIRST : FIRST + count] = IMAGE
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family.startswith("qwen"):
        patches = torch.randn(sequences * grid * grid, 3 * 2 * 4 * 4, generator=generator)
        sizes = torch.tensor([[1, grid, grid]] * sequences)
        return given | {"pixel_values": patches, "image_grid_thw": sizes, "mm_token_type_ids": (ids == IMAGE).int()}
    given["pixel_values"] = torch.randn(sequences, 3, 32, 32, generator=generator)
    return given | ({"token_type_ids": (ids == IMAGE).long()} if family == "gemma3" else {})
