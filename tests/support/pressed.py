"""What a model saw over a cache that drops keys, read naively in float64: each pass's own maps, with the tokens whose
keys the cache held."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
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


def steps(model: Any, ids: Tensor, cache: Cache, prompt: int = PROMPT, **given: Any) -> list[Any]:
    """A prefill of the `prompt` first tokens, then a token at a time; positions are those of the tokens."""
    places = torch.arange(ids.shape[1])[None]
    pieces = [(0, prompt), *((step, step + 1) for step in range(prompt, ids.shape[1]))]
    with torch.no_grad():
        return [
            model(ids[:, a:b], **{CACHE: cache}, position_ids=places[:, a:b], **given) for a, b in pieces
        ]  # fmt: skip


def as_seen(
    model: Any, ids: Tensor, cache: Cache, held: Callable[[int, int], Tensor], prompt: int = PROMPT
) -> list[Tensor]:
    """The maps (B, H, T, T) of what the model saw, in float64: `held` gives the tokens (B, G, n) of a layer's slots at
    the step whose query is a token. A key that the cache does not hold has no attention."""
    eager = model.double()
    eager.set_attn_implementation("eager")
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
            tokens = tokens.repeat_interleave(row.shape[1] // tokens.shape[1], 1)
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
