"""Full attention maps of chosen heads over a short text, from the model's own eager attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinkscope.errors import SinkscopeError

MOST_TOKENS = 256


@dataclass(frozen=True)
class HeadMap:
    """One head's map: `weights` A[query, key], [T, T] float64, and its T tokens."""

    layer: int
    head: int
    weights: np.ndarray
    tokens: list[str]


def attention_map(
    model: str, text: str, layers: list[int], layer: int, head: int, *, device: str = "auto", dtype: str = "auto",
    revision: str | None = None, trust_remote_code: bool = False, adapter: str | None = None,
) -> tuple[np.ndarray, list[str]]:  # fmt: skip
    """A[query, key] of one head, [T, T] float64, and the T tokens, as in `attention_maps`. Raises as that does."""
    (head_map,) = attention_maps(
        model, text, layers, [(layer, head)], device=device, dtype=dtype, revision=revision,
        trust_remote_code=trust_remote_code, adapter=adapter,
    )  # fmt: skip
    return head_map.weights, head_map.tokens


def attention_maps(
    model: str, text: str, layers: list[int], heads: Sequence[tuple[int, int]], lengths: Sequence[int] = (), *,
    device: str = "auto", dtype: str = "auto", revision: str | None = None, trust_remote_code: bool = False,
    adapter: str | None = None, weights: str | None = None,
) -> list[HeadMap]:  # fmt: skip
    """The map of every (layer, head), first over the first length's tokens, then over the next's.

    `lengths`: each reads so many first tokens of the text in a pass of its own; none reads the whole text. The
    tokenizer adds its usual special tokens. `layers`: the numbers of the layers that have attention, in order, as a
    run's manifest lists them; hybrid models have layers without attention. `weights`: the SHA-256 that the weights must
    have, as a run's manifest says; None takes any. Raises SinkscopeError where the model cannot be loaded, has other
    weights or no tokenizer, the text has no token, more than 256 or fewer than a length, more than the model has
    positions, a layer or head does not exist, or the model does not return one map per layer.
    """
    from sinkscope.checkpoints import LoadOptions

    options = LoadOptions(
        revision=revision, device=device, dtype=dtype, trust_remote_code=trust_remote_code, adapter=adapter
    )
    checkpoint = _opened(model, options, weights)
    ids = checkpoint.tokenizer(text, return_tensors="pt")["input_ids"]
    if not 0 < ids.shape[1] <= MOST_TOKENS:
        raise SinkscopeError(f"--text has {ids.shape[1]} tokens: give 1 to {MOST_TOKENS}, the map must stay readable")
    for length in lengths:
        if not 2 <= length <= ids.shape[1]:
            raise SinkscopeError(
                f"--length {length}: the text has {ids.shape[1]} tokens; give a length from 2 to that number"
            )
    limit, longest = checkpoint.max_positions, max(lengths, default=ids.shape[1])
    if limit is not None and longest > limit:
        asked = f"--length {longest}" if lengths else f"--text {longest} tokens"
        raise SinkscopeError(f"{model} has {limit} positions, and {asked}: give fewer")
    head_maps = []
    for length in lengths or [ids.shape[1]]:
        maps = _own_maps(model, checkpoint, ids[:, :length], len(layers))
        tokens = [str(token) for token in checkpoint.tokenizer.convert_ids_to_tokens(ids[0, :length].tolist())]
        for layer, head in heads:
            head_maps.append(HeadMap(layer, head, _of_head(maps, layers, layer, head), tokens))
    return head_maps


def _opened(model: str, options: Any, weights: str | None) -> Any:
    """The checkpoint, which has these weights and a tokenizer."""
    from sinkscope.checkpoints import open_checkpoint

    try:
        checkpoint = open_checkpoint(model, options)
    except SinkscopeError as error:
        raise SinkscopeError(f"no run stores attention maps: the model must be loaded to draw them. {error}") from None
    if weights is not None and checkpoint.facts["weights_sha256"] not in (None, weights):
        raise SinkscopeError(f"{model} holds other weights than the run was made of: scan it again, or put those back")
    if not callable(checkpoint.tokenizer):  # None, or the KindNames of a model that reads vectors
        raise SinkscopeError(f"{model} has no tokenizer: it cannot read a text")
    return checkpoint


def _own_maps(model: str, checkpoint: Any, ids: Any, expected: int) -> list[Any]:
    """The maps that the model's eager attention returns, [1, head, query, key] each."""
    import torch

    from sinkscope.checkpoints.forward import Forward, eager

    forward = Forward(checkpoint.model)
    with torch.no_grad(), eager(checkpoint.model):
        output: Any = forward(ids.to(checkpoint.device), output_attentions=True)
    maps = [weights for weights in getattr(output, "attentions", None) or () if weights is not None]
    if len(maps) != expected:
        raise SinkscopeError(f"{model} returns {len(maps)} attention maps for {expected} layers with attention")
    return maps


def _of_head(maps: list[Any], layers: list[int], layer: int, head: int) -> np.ndarray:
    if layer not in layers:
        raise SinkscopeError(f"--layer {layer}: layers with attention are {_listed(layers)}")
    weights = maps[layers.index(layer)]
    if not 0 <= head < weights.shape[1]:
        raise SinkscopeError(f"--head {head}: layer {layer} has heads 0 to {weights.shape[1] - 1}")
    return np.asarray(weights[0, head].cpu().double().numpy())


def _listed(layers: list[int]) -> str:
    """`0 to 17`; lists every number where there are gaps."""
    whole = layers == list(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
