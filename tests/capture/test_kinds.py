"""Which keys a layer can see is told by what it does, where its module says something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import sinkscope

SIZES = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
MIXED = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], "num_hidden_layers": 2}
INKLING = {
    "num_hidden_layers": 6, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
    "sliding_window_size": 8, "moe_intermediate_size": 24, "n_routed_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


def model_of(family: str, **settings: Any) -> Any:
    if family not in CONFIG_MAPPING:
        pytest.skip(f"this version of transformers has no {family}")
    torch.manual_seed(0)
    return AutoModel.from_config(AutoConfig.for_model(family, **SIZES, **settings)).eval()


def ids_of(length: int) -> Tensor:
    return torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0))


def layers(family: str, length: int, **settings: Any) -> Any:
    return sinkscope.scan(model_of(family, **settings), data=ids_of(length)).layers


@pytest.mark.parametrize(
    ("family", "settings", "kinds"),
    [
        ("exaone4", MIXED, ["sliding:8", "full"]),  # every layer has the attribute sliding_window
        ("doge", {"sliding_window": 8, "num_hidden_layers": 2}, ["sliding:8"] * 2),  # it makes a mask of its own
        ("doge", {"num_hidden_layers": 2}, ["full"] * 2),
        (
            "gpt_neo",
            {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
            ["full", "sliding:8"],
        ),
    ],
)
def test_a_layer_has_the_window_of_its_mask(family: str, settings: dict[str, Any], kinds: list[str]) -> None:
    assert layers(family, 20, **settings)["kind"].tolist() == kinds


@pytest.mark.parametrize("length", [16, 23])  # as many tokens as the dry run has, and others
def test_attention_over_the_layers_before_is_no_layer(length: int) -> None:
    found = layers("inkling2_text", length, **INKLING)
    assert found["module"].tolist() == [f"layers.{number}.self_attn" for number in range(6)]
    assert found["kind"].tolist() == [*["sliding:8"] * 5, "full"]


def test_attention_over_the_layers_before_is_no_layer_of_a_watch() -> None:
    model = model_of("inkling2_text", **INKLING)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for length in (16, 23):
            model(ids_of(length))
    run = seen.run()
    assert run.layers["module"].tolist() == [f"layers.{number}.self_attn" for number in range(6)]
    assert run.sequences["sequence"].nunique() == 4
