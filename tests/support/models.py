"""Tiny seeded random models, one per family, for the tests."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

FAMILIES = ("llama", "mistral", "qwen3", "gpt2", "gpt_neox", "gemma2", "gemma3", "gpt_oss", "bert")
EAGER_ONLY = ("gemma2", "gpt_oss")
VOCABULARY = 97
WINDOW = 16

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.2,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_GROUPED: dict[str, Any] = {**_SIZES, "num_key_value_heads": 2}
_OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**_GROUPED}),
    "mistral": ("mistral", {**_GROUPED, "sliding_window": WINDOW}),
    "qwen3": ("qwen3", {**_GROUPED, "head_dim": 24}),
    "gpt2": ("gpt2", {"n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}),
    "gpt_neox": ("gpt_neox", {**_SIZES, "use_parallel_residual": True}),
    "gemma2": (
        "gemma2",
        {
            **_GROUPED,
            "head_dim": 20,
            "query_pre_attn_scalar": 16,
            "attn_logit_softcapping": 4.0,
            "sliding_window": WINDOW,
        },
    ),
    "gemma3": (
        "gemma3_text",
        {
            **_GROUPED,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            **_GROUPED,
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "bert": ("bert", {**_SIZES}),
    "deepseek_v3": (  # latent attention, without experts
        "deepseek_v3",
        {
            **{**_SIZES, "num_key_value_heads": 4, "first_k_dense_replace": 3},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12},
        },
    ),
    "opt": ("opt", {**_SIZES, "ffn_dim": 96, "word_embed_proj_dim": 64}),
}


def tiny(family: str, attn_implementation: str | None = None, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 base model in eval mode; the same family and seed always give the same weights.

    `attn_implementation` None takes "sdpa" where the family has it, else "eager".
    `overrides` go into the configuration. One-dimensional parameters (norm gains, biases, learned sinks)
    are shifted at random, since the libraries start them at 0 or 1, which would hide mistakes.
    """
    model_type, own = _OWN[family]
    config = AutoConfig.for_model(model_type, **{**_COMMON, **own, **overrides})
    if attn_implementation is None:  # transformers 5.17 runs Gemma-2 under sdpa too, without its soft cap
        attn_implementation = "eager" if family in EAGER_ONLY else "sdpa"
    torch.manual_seed(seed)
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape))
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.add_(0.7)
            if name.endswith("sinks"):
                parameter.add_(1.0)
    return model.eval()


def random_ids(sequences: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids [sequences, length], special tokens avoided."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (sequences, length), generator=generator)
