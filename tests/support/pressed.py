"""What a model saw over a cache that drops keys, read naively in float64: each pass's own maps, with the tokens whose
keys the cache held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AttentionInterface, Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from writers import CACHE

import sinkscope

PROMPT, WRITTEN = 12, 20


def text() -> Tensor:
    return torch.randint(3, 97, (2, PROMPT + WRITTEN), generator=torch.Generator().manual_seed(2))


class Press:
    """Prunes the cache of each attention layer after the prefill, as kvpress' hooks do.

    `choose` takes a layer and its keys (B, G, T, d) and gives the slots that stay, (B, G, n), in any order. `kept`: the
    tokens of every layer's slots.
    """

    def __init__(self, model: Any, choose: Callable[[int, Tensor], Tensor]) -> None:
        self.choose, self.kept = choose, dict[int, Tensor]()
        self.layers = [layer.self_attn for layer in model.model.layers]

    def prune(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        if kwargs["hidden_states"].shape[1] == 1:
            return
        layer = kwargs[CACHE].layers[module.layer_idx]
        kept = self.kept[module.layer_idx] = self.choose(module.layer_idx, layer.keys)
        index = kept[..., None].expand(-1, -1, -1, layer.keys.shape[-1])
        layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)

    @contextmanager
    def pressing(self) -> Iterator[None]:
        hooks = [layer.register_forward_hook(self.prune, with_kwargs=True) for layer in self.layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def attends(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    """The model attends by a function of transformers' interface."""
    before = model.config._attn_implementation
    AttentionInterface.register("pressed", function)
    model.set_attn_implementation("pressed")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        del AttentionInterface._global_mapping["pressed"]


def overwriting(hidden: dict[int, Tensor], scale: float = 1e7) -> Callable[..., Any]:
    """Attention of steps that first writes keys into the `hidden` slots of a cache, (B, G, n) of every layer, which
    point away from the queries, as presses do that keep other numbers of keys in each head."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        if query.shape[2] == 1:
            which = hidden[module.layer_idx]
            unit = torch.nn.functional.normalize(query, dim=-1).unflatten(1, (key.shape[1], -1))
            away = -scale * unit.sum(2).expand(-1, -1, which.shape[2], -1)
            key[:, :, : which.shape[2]] = away.where(which[..., None], key[:, :, : which.shape[2]])
        return sdpa_attention_forward(module, query, key, value, mask, **given)

    return attention


def naive(hidden: dict[int, Tensor]) -> Callable[..., Any]:
    """The same attention with its weights, written out: steps do not see the hidden slots."""

    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **given: Any) -> Any:
        times = query.shape[1] // key.shape[1]
        key, value = (each.repeat_interleave(times, 1) for each in (key, value))
        logits = given["scaling"] * query @ key.mT
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril(logits.shape[-1] - logits.shape[-2])
        seen = seen.expand(logits.shape).clone()
        if query.shape[2] == 1:
            which = hidden[module.layer_idx].repeat_interleave(times, 1)
            seen[..., : which.shape[2]] &= ~which[:, :, None]
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        return (weights @ value).transpose(1, 2).contiguous(), weights

    return attention


def steps(model: Any, ids: Tensor, cache: Cache, prompt: int = PROMPT, length: int = 1, **given: Any) -> list[Any]:
    """A prefill of the `prompt` first tokens, then `length` tokens at a time; positions are those of the tokens."""
    places = torch.arange(ids.shape[1])[None]
    starts = range(prompt, ids.shape[1], length)
    pieces = [(0, prompt), *((start, min(start + length, ids.shape[1])) for start in starts)]
    with torch.no_grad():
        return [
            model(ids[:, a:b], **{CACHE: cache}, position_ids=places[:, a:b], **given) for a, b in pieces
        ]  # fmt: skip


def every_slot(layer: int, query: int) -> Tensor:
    """The tokens of the slots of a cache that drops none."""
    return torch.arange(query + 1)[None, None]


def as_seen(
    model: Any,
    ids: Tensor,
    cache: Cache,
    held: Callable[[int, int], Tensor],
    prompt: int = PROMPT,
    attention: Callable[..., Any] | None = None,
) -> list[Tensor]:
    """The maps (B, H, T, T) of what the model saw, in float64: `held` gives the tokens (B, G, n) of a layer's slots at
    the step whose query is a token. A key that the cache does not hold has no attention. `attention`: in eager's
    place."""
    eager = model.double()
    eager.set_attn_implementation("eager")
    with nullcontext() if attention is None else attends(eager, attention):
        passes = steps(eager, ids, cache, prompt, output_attentions=True)
    batch, length = ids.shape
    found = []
    for layer in range(len(model.model.layers)):
        first = passes[0].attentions[layer]
        whole = first.new_zeros(batch, first.shape[1], length, length)
        whole[:, :, :prompt, :prompt] = first
        for query in range(prompt, length):
            row = passes[query - prompt + 1].attentions[layer][:, :, 0]
            tokens = held(layer, query)
            tokens = tokens.expand(batch, -1, -1).repeat_interleave(row.shape[1] // tokens.shape[1], 1)
            whole[:, :, query].scatter_(2, tokens, row)
        found.append(whole)
    return found


def assert_reads(run: sinkscope.Run, maps: list[Tensor]) -> None:
    """The run's numbers are those of these maps."""
    length = maps[0].shape[-1]
    whole = torch.cat(maps, 1)
    seen = (whole > 0).double()
    columns = whole.sum(2) / seen.sum(2)
    enough = 4 * seen.sum(2) >= seen.sum(2).amax(-1, keepdim=True)
    entropy = -(whole * whole.clamp(min=1e-300).log()).sum(-1)
    expected = {
        "bos_mass": whole[..., 1:, 0].mean(-1),
        "sink_score": whole[..., 0].mean(-1),
        "first_visible": seen[..., 1:, 0].mean(-1),
        "first_argmax": (whole.argmax(-1) == 0)[..., 1:].double().mean(-1),
        "self_mass": whole.diagonal(dim1=-2, dim2=-1)[..., 1:].mean(-1),
        "previous_mass": whole.diagonal(-1, dim1=-2, dim2=-1).mean(-1),
        "entropy": entropy.mean(-1),
        "uniformity": (entropy[..., 1:] / seen[..., 1:, :].sum(-1).log()).mean(-1),
        "sinks_per_sequence": ((columns > 0.3) & enough).double().sum(-1),
        "tail_mass": whole[..., max(1, length - 64) :, 0].mean(-1),
    }
    for name, values in expected.items():
        np.testing.assert_allclose(run.heads[name], values.mean(0).numpy(), atol=1e-5, err_msg=name)
