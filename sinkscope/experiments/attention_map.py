"""One head's full attention map over a short text, from the model's own eager attention."""

from __future__ import annotations

from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError

MOST_TOKENS = 256


def attention_map(
    model: str, text: str, layers: list[int], layer: int, head: int, *, device: str = "auto", dtype: str = "auto",
    revision: str | None = None, trust_remote_code: bool = False, adapter: str | None = None,
) -> tuple[np.ndarray, list[str]]:  # fmt: skip
    """A[query, key] of one head, [T, T] float64, and the T tokens; the tokenizer adds its usual special tokens.

    `layers`: the numbers of the layers that have attention, in order, as a run's manifest lists them; hybrid models
    have layers without attention. Raises SinkscopeError where there is no tokenizer, the text has no token or more than
    256, the layer or head does not exist, or the model does not return one map per layer.
    """
    import torch

    from sinkscope.checkpoints import LoadOptions, open_checkpoint
    from sinkscope.checkpoints.eager import eager
    from sinkscope.checkpoints.forward import Forward

    options = LoadOptions(
        revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code, adapter=adapter
    )
    checkpoint = open_checkpoint(model, options)
    if not callable(checkpoint.tokenizer):  # None, or the KindNames of a model that reads vectors
        raise SinkscopeError(f"{model} has no tokenizer: it cannot read a text")
    ids = checkpoint.tokenizer(text, return_tensors="pt")["input_ids"]
    if not 0 < ids.shape[1] <= MOST_TOKENS:
        raise SinkscopeError(f"--text has {ids.shape[1]} tokens: give 1 to {MOST_TOKENS}, the map must stay readable")
    forward = Forward(checkpoint.model)
    with torch.no_grad(), eager(checkpoint.model):
        output: Any = forward(ids.to(checkpoint.device), output_attentions=True)
    maps = [each for each in getattr(output, "attentions", None) or () if each is not None]
    if len(maps) != len(layers):
        raise SinkscopeError(f"{model} returns {len(maps)} attention maps for {len(layers)} layers with attention")
    if layer not in layers:
        raise SinkscopeError(f"--layer {layer}: layers with attention are {_listed(layers)}")
    weights = maps[layers.index(layer)]
    if not 0 <= head < weights.shape[1]:
        raise SinkscopeError(f"--head {head}: layer {layer} has heads 0 to {weights.shape[1] - 1}")
    tokens = [str(token) for token in checkpoint.tokenizer.convert_ids_to_tokens(ids[0].tolist())]
    return weights[0, head].cpu().double().numpy(), tokens


def _listed(layers: list[int]) -> str:
    """`0 to 17`; lists every number where there are gaps."""
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
