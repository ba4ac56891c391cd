"""Tiny random configurations of every family transformers knows, for `test_families`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward

LENGTH, VOCABULARY = 32, 99
FAST_CAUSAL = (
    *("llama", "gemma3_text", "gpt_oss", "gemma2"),  # the interface: shared keys, windows, learned sinks, a soft cap
    *("bloom", "gpt_neo", "xlnet"),  # inline: a bias added in the product, windows, einsum and two streams
    *("deepseek_v3", "zamba", "mamba"),  # latent attention, one module called in several layers, no attention
)
"""One family for each way in which attention is done; the full tier of `test_families` reads all."""

SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "model_dim", "emb_dim", "embed_dim"), 32),
    **dict.fromkeys(("embedding_size", "word_embed_proj_dim", "input_embedding_size", "lru_width"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 2),
    **dict.fromkeys(("encoder_layers", "num_encoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_attn_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "d_inner", "dim_ff", "inner_dim"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_hidden_size", "hidden_dim"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "top_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "d_kv", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_d_state", "state_size", "ssm_state_size", "time_step_rank", "rotary_dim"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "index_topk"), 4),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attn_window"), 8),
    **dict.fromkeys(("linear_num_key_heads", "num_key_value_heads", "mamba_expand", "index_n_heads"), 2),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **{
        "image_size": 32,
        "patch_size": 8,
        "num_channels": 3,
        "decoder_hidden_size": 32,
        "decoder_intermediate_size": 48,
    },
    **{"index_head_dim": 16, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"decoder_start_token_id": 1, "sep_token_id": 2, "cls_token_id": 1, "max_source_positions": 50},
}

MIXED = {"layer_types": ["linear_attention", "full_attention"]}
TURNS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
WINDOWS = {"embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 2, "patch_size": 4}
EXTRA: dict[str, dict[str, Any]] = {
    "bailing_hybrid": MIXED,
    "audio-spectrogram-transformer": {"max_length": 64},
    "bamba": {"attn_layer_indices": [1]},
    "cohere_compass_text": {
        "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}},
    "diffusion_gemma": {
        "text_config": {"num_experts": 4, "top_k_experts": 2, "use_bidirectional_attention": None},
        "canvas_length": 12,
    },
    "dots3_note_text": {"num_key_value_heads": 4},
    "blt": {
        "encoder_config": {"cross_attn_k": 2, "hidden_size_global": 32},
        "decoder_config": {"cross_attn_k": 2, "hidden_size_global": 32},
        "encoder_hash_byte_group_vocab": 50,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "intermediate_size": [48] * 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "cpmant": {"prompt_length": 0},
    "dots3_note": {"vision_config": {"adapter_out_dim": 32}, "audio_config": {"adapter_out_dim": 32}},
    "esmc": {"num_key_value_heads": 4},
    "funnel": {"bos_token_id": 1, "eos_token_id": 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "mobilebert": {"intra_bottleneck_size": 16, "embedding_size": 16},
    "luke": {"entity_vocab_size": 9, "entity_emb_size": 8},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "neomme": {"head_dim": 16},
    "perceiver": {"num_self_attends_per_block": 2, "d_latents": 32, "num_latents": 8},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "granitemoehybrid": MIXED,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": MIXED,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "lfm3": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "expand": 2},
    "qwen3_5_moe_text": MIXED,
    "qwen3_5_text": MIXED,
    "qwen3_next": MIXED,
    "qwen4_exp_text": {
        **MIXED,
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8},
        **{"indexer_compress_ratio": 2, "hc_lowrank": 4},
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"]},
    "reformer": {
        "is_decoder": True,
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
    },
    **dict.fromkeys(("swin", "swinv2", "donut-swin", "maskformer-swin"), WINDOWS),
    **dict.fromkeys(("qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_omni_moe_text"), TURNS),
    **dict.fromkeys(("glm4v_text", "glm_ocr_text", "paddleocr_vl_text", "hunyuan_vl_text", "hy_v4_vl_text"), TURNS),
    **dict.fromkeys(("cosmos3_edge_text", "ernie4_5_vl_moe_text"), TURNS),
    "qwen2_5_omni_thinker": {"vision_start_token_id": 5},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 5},
    "chameleon": {"vocabulary_map": {"<image>": 3}},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "glm4v_moe_text": TURNS | {"partial_rotary_factor": 1.0},
    "glm5_next_text": MIXED | {"index_topk": 16, "qk_rope_head_dim": 0},
    "granite_docling_vision": {"out_hidden_size": 32},
    "inkling2_vision": {"text_hidden_size": 32},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"num_hidden_layers": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1},
}
"""Settings beyond the sizes that a family's own checks require of a tiny configuration."""


MUSIC: dict[str, Any] = {
    "text_encoder": {"model_type": "t5"},
    "audio_encoder": {"model_type": "encodec"},
    "decoder": {},
}
NO_DEFAULT: dict[str, dict[str, Any]] = {
    "diffusion_gemma": {"vision_config": {"model_type": "gemma4_vision"}},
    "gemma4_assistant": EXTRA["gemma4_assistant"],
    "encoder-decoder": {"encoder": {"model_type": "bert"}, "decoder": {"model_type": "bert"}},
    "musicgen": MUSIC,
    "musicgen_melody": MUSIC,
    "vision-encoder-decoder": {
        "encoder": {"model_type": "vit"},
        "decoder": {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
    },
}
"""Settings that a configuration's own defaults leave out or make invalid (in transformers 5.17 or in all versions)."""

WHOLE_PARTS = ("dots3_note_text",)
"""Sub-configurations whose sizes also stand at the top level, where they would mix with the sizes set here."""


def overrides(config: Any) -> dict[str, Any]:
    """The sizes a configuration knows, under its own names."""
    aliases = getattr(config, "attribute_map", {})
    written = config.to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in written or name in aliases}
    lists = [name for name in sizes if isinstance(written.get(aliases.get(name, name)), list | tuple)]
    sizes |= {name: [sizes.pop(name)] * 2 for name in lists if name == "image_size"}
    sizes = {name: value for name, value in sizes.items() if name not in lists or name == "image_size"}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = 4  # latent attention has a key for each head
    return {name: value for name, value in sizes.items() if aliases.get(name) not in sizes}


def tiny_config(model_type: str) -> Any:
    """A configuration of that type, with 2 layers and 4 heads of width 8 where these can be set."""
    family = CONFIG_MAPPING[model_type]
    whole = family(
        **copy.deepcopy(NO_DEFAULT.get(model_type, {}))
    )  # transformers 5.17 changes the dictionaries it is given
    return family(**merged(sized(whole), EXTRA.get(model_type, {})))


def sized(config: Any) -> dict[str, Any]:
    """The sizes of a configuration and of its parts."""
    values = overrides(config)
    for name in getattr(type(config), "sub_configs", None) or {}:
        part = getattr(config, name, None)
        if part is None:
            continue
        if part.model_type in WHOLE_PARTS:
            return {name: tiny_config(part.model_type)}
        kind = {"model_type": part.model_type} if getattr(part, "model_type", "") else {}
        values[name] = merged(sized(part) | kind, EXTRA.get(part.model_type, {}))
    return values


def merged(values: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """`values` updated with `extra`, also within nested dictionaries."""
    both = {
        name: merged(values[name], value) if isinstance(value, dict) and isinstance(values.get(name), dict) else value
        for name, value in extra.items()
    }
    return values | both


def tiny_model(auto: Any, model_type: str, implementation: str | None = None) -> PreTrainedModel:
    """A float32 model in eval mode. All weights are shifted a little: those that start at 0 or 1 hide mistakes."""
    torch.manual_seed(0)
    chosen = {} if implementation is None else {"attn_implementation": implementation}
    config = tiny_config(model_type)
    if model_type == "reformer":
        config.is_decoder = auto is AutoModelForCausalLM
    if model_type in DECODER_ALONE:  # the automatic class hands the whole configuration to the decoder's class
        model = auto._model_mapping[type(config)]._from_config(config.decoder, dtype=torch.float32, **chosen)
    else:
        model = auto.from_config(config, dtype=torch.float32, **chosen)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model.eval()


WAVES = ("wav2vec2", "wav2vec2-conformer", "hubert", "wavlm", "data2vec-audio", "sew", "sew-d", "unispeech")
WAVES += ("unispeech-sat", "moonshine", "moonshine_streaming", "speecht5")
"""Speech families that read samples; the other ones read features."""
FRAMES = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim", "n_mels")


def speech_inputs(family: str, config: Any) -> dict[str, Tensor]:
    """Two recordings of equal length, as the family's feature extractor would return them, and text for its decoder."""
    generator = torch.Generator().manual_seed(0)
    parts = [config, *(getattr(config, name, None) for name in ("encoder_config", "audio_config"))]
    width = next((getattr(part, name) for part in parts for name in FRAMES if hasattr(part, name)), 80)
    width *= 4 if family == "granite_speech5_ctc" else 1  # it stacks four frames before its model
    if family in WAVES:
        name, shape = "input_values", (2, 6400)
    elif family == "audio-spectrogram-transformer":
        name, shape = "input_values", (2, config.max_length, width)
    elif family in ("whisper", "qwen2_audio_encoder"):
        name, shape = "input_features", (2, width, 2 * config.max_source_positions)
    else:
        name, shape = "input_features", (2, 160, width)
    given = {name: torch.randn(*shape, generator=generator)}
    if getattr(config, "is_encoder_decoder", False) and family != "speecht5":  # its decoder reads sound
        given["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 7), generator=generator)
    return given


@contextmanager
def unaveraged() -> Iterator[list[Tensor]]:
    """Within the block, collects the maps of all heads that torch's own multi-head attention computes."""
    maps: list[Tensor] = []
    original = torch.nn.functional.multi_head_attention_forward

    def attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, probabilities = original(*args, **kwargs, average_attn_weights=False)
        maps.append(probabilities)
        return output, probabilities.mean(1)

    torch.nn.functional.multi_head_attention_forward = attention
    try:
        yield maps
    finally:
        torch.nn.functional.multi_head_attention_forward = original


DECODER_ALONE = ("musicgen", "musicgen_melody")
STREAMS = {"encoder": "encoder_attentions", "decoder": "decoder_attentions", "cross": "cross_attentions"}


def eager_outputs(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, **extra: Any) -> Any:
    """What an eager model returns with its maps; None where it cannot return any."""
    forward = Forward(wrap_model(model).model)
    with torch.no_grad():
        forward(ids, mask, **extra)  # BigBird takes its final form in its first pass
        try:
            return forward(ids, mask, **extra, output_attentions=True)
        except (TypeError, ValueError, AttributeError):
            return None


def eager_maps(outputs: Any, family: str, streams: list[str]) -> list[Tensor] | None:
    """The maps among an eager model's outputs, one for each entry of `streams`.

    None where their number differs, or where they are not whole (SINKS_ON_OUTPUT, SPLIT).
    """
    if len(getattr(outputs, "attentions", None) or ()) == len(streams):
        streams = ["text"] * len(streams)
    kept = {stream: list(getattr(outputs, STREAMS.get(stream, "attentions"), None) or ()) for stream in streams}
    if any(len(maps) != streams.count(stream) for stream, maps in kept.items()) or family in (*SINKS_ON_OUTPUT, *SPLIT):
        return None
    maps = [kept[stream].pop(0) for stream in streams]
    if family in RETURN_SCORES:
        maps = [each.softmax(-1) if (each < 0).any() else each for each in maps]
    return maps


SPLIT = ("t5gemma2",)
"""Its decoder attends to its own and the encoder's positions in one softmax, and returns the two parts separately."""

RETURN_SCORES = ("squeezebert", "prophetnet")
"""Families that return the scores before the softmax; ProphetNet does so in its encoder and cross-attention only."""

SINKS_ON_OUTPUT = ("granite_swa", "granitemoe_swa")
"""Families whose eager attention scales its output by what the sinks leave, but returns maps that sum to 1."""


def dense_maps(forward: Any, ids: Tensor, mask: Tensor | None, **extra: Any) -> list[Tensor]:
    """The whole map of every dispatched call in float64, in the order of the calls."""
    maps = []

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        scaling: float | None = None, dropout: float = 0.0, is_causal: bool | None = None,
        position_bias: Tensor | None = None, softcap: float | None = None, s_aux: Tensor | None = None, **kwargs: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        assert kwargs.get("sinks") is None
        repeat = query.shape[1] // key.shape[1]
        keys, values = (tensor.double().repeat_interleave(repeat, 1) for tensor in (key, value))
        logits = query.double() @ keys.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if position_bias is not None:
            logits = logits + position_bias
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        if attention_mask is None:
            if causal and query.shape[2] > 1:
                rows, places = torch.arange(logits.shape[-2])[:, None], torch.arange(logits.shape[-1])
                logits = logits.where(places <= rows, -torch.inf)
        elif attention_mask.dtype == torch.bool:
            logits = logits.where(attention_mask, -torch.inf)
        else:
            logits = logits + attention_mask.double()
        blind = (logits < -1e30).all(-1, keepdim=True)  # a query that sees no key gives none any mass
        if s_aux is not None:
            logits = torch.cat([logits, s_aux.double().view(1, -1, 1, 1).expand(*logits.shape[:3], 1)], -1)
        hidden = (logits == -torch.inf).all(-1, keepdim=True)  # by a finite mask, the model attends to all keys alike
        weights = logits.softmax(-1)[..., : key.shape[2]].masked_fill(hidden, 0.0)
        if query.shape[2] > 1:
            maps.append(weights.masked_fill(blind, 0.0))
        output = weights @ values
        return output.to(query.dtype).transpose(1, 2).contiguous(), None

    table = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = dict(table)
    table.update(sdpa=attention, eager=attention)
    try:
        with torch.no_grad():
            forward(ids, mask, **extra)
    finally:
        table.clear()
        table.update(before)
    return maps
