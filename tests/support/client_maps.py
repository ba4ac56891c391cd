"""The attention maps that other libraries form themselves, in float64, of what the programs of examples/clients do.

Nothing of sinkscope is used here. Every function takes a program's module and its arguments, and returns `Maps`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Maps = list[list[np.ndarray]]
"""For each sequence, each layer's map [head, query, key] in float64. A key that a query cannot see has 0."""


def figures(maps: Maps) -> dict[str, np.ndarray]:
    """Three columns of docs/metrics.md for every head, layer by layer: means over the sequences."""
    by_sequence = [np.concatenate([_figures(each) for each in layers]) for layers in maps]
    mean = np.mean(by_sequence, axis=0)
    return dict(zip(("bos_mass", "entropy", "self_mass"), mean.T, strict=True))


def _figures(weights: np.ndarray) -> np.ndarray:
    """[head, column] of one map [head, query, key]."""
    logs = np.log(weights, out=np.zeros_like(weights), where=weights > 0)
    own = weights.diagonal(axis1=-2, axis2=-1)
    columns = weights[:, 1:, 0].mean(-1), -(weights * logs).sum(-1).mean(-1), own[:, 1:].mean(-1)
    return np.stack(columns, -1)


def array(weights: Tensor) -> np.ndarray:
    """The tensor as float64 numbers of numpy."""
    found: np.ndarray = weights.detach().double().numpy()
    return found


# transformers: the weights that its eager attention returns (`output_attentions` collects these)


@contextmanager
def returned(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Collects the weights [batch, head, query, key] that each attention module returns, pass by pass."""
    found: dict[str, list[Tensor]] = {}
    last: list[Tensor] = []

    def hook(name: str) -> Callable[..., None]:
        def note(_: Any, __: Any, output: Any) -> None:
            weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
            if isinstance(weights, Tensor) and weights.dim() == 4 and not any(weights is each for each in last):
                found.setdefault(name, []).append(weights.detach())
                last[:] = [weights]

        return note

    hooks = [module.register_forward_hook(hook(name)) for name, module in model.named_modules()]
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()


def eager(model: Any) -> Any:
    """The model in float64, attending by transformers' plain code."""
    model.double().set_attn_implementation("eager")
    return model


def whole(pieces: Sequence[Tensor], held: Sequence[Tensor] | None = None) -> np.ndarray:
    """One map [head, query, key] of a first pass and of the steps after it, [1, head, query, key] each.

    `held`: the tokens (head, key) of each piece's keys; by default the first ones in order.
    """
    length = sum(each.shape[2] for each in pieces)
    found, start = pieces[0].new_zeros(pieces[0].shape[1], length, length), 0
    for number, each in enumerate(pieces):
        count, keys = each.shape[2:]
        tokens = torch.arange(keys).expand(each.shape[1], -1) if held is None else held[number]
        found[:, start : start + count].scatter_(2, tokens[:, None].expand(-1, count, -1), each[0])
        start += count
    return array(found)


def of_lm_eval(program: ModuleType, folder: str) -> Maps:
    """Each pass of lm-eval is a sequence."""
    model = eager(program.load(folder))
    with returned(model) as found:
        program.work(model)
    return [[array(each[0]) for each in layers] for layers in zip(*found.values(), strict=True)]


def of_generate(program: ModuleType, folder: str) -> Maps:
    """The passes of one generation are one sequence."""
    model = eager(program.load(folder))
    with returned(model) as found:
        program.work(model)
    return [[whole(pieces) for pieces in found.values()]]


def of_press(program: ModuleType, folder: str, name: str) -> Maps:
    """The model in float64 goes on from the keys that the press keeps in float32: of two scores that are nearly the
    same, it may keep the other one in float64."""
    with kept_by(program.PRESSES[name]) as kept:
        program.work(program.load(folder, name), name)
    model = eager(program.load(folder, name))
    with returned(model) as found, keeping(program.PRESSES[name], kept):
        program.work(model, name)
    return [[_pressed(pieces, kept.get(layer)) for layer, pieces in enumerate(found.values())]]


def _pressed(pieces: Sequence[Tensor], kept: Tensor | None) -> np.ndarray:
    """`kept`: the tokens (group, key) that the press left of the first pass; None where it left all."""
    first, heads = pieces[0].shape[2], pieces[0].shape[1]
    left = torch.arange(first)[None] if kept is None else kept
    left = left.repeat_interleave(heads // len(left), 0)
    held, now = [torch.arange(first).expand(heads, -1)], first
    for each in pieces[1:]:
        now += each.shape[2]
        held.append(torch.cat([left, torch.arange(first, now).expand(heads, -1)], 1))
    return whole(pieces, held)


@contextmanager
def kept_by(press: type) -> Iterator[dict[int, Tensor]]:
    """The tokens (group, key) whose keys presses of a class keep of a first pass, by layer."""
    kept: dict[int, Tensor] = {}

    def hook(own: Any, self: Any, module: Any, args: Any, given: dict[str, Any], output: Any) -> Any:
        layer = given["past_key_values"].layers[module.layer_idx]
        before = layer.keys
        found = own(self, module, args, given, output)
        if layer.keys.shape[2] < before.shape[2]:
            same = (layer.keys[0, :, :, None] == before[0, :, None]).all(-1)
            assert bool((same.sum(-1) == 1).all())
            kept[module.layer_idx] = same.int().argmax(-1)
        return found

    with _hooked(press, hook):
        yield kept


@contextmanager
def keeping(press: type, kept: dict[int, Tensor]) -> Iterator[None]:
    """Presses of a class keep these tokens (group, key) of a first pass, layer by layer, whatever they would keep."""
    left = dict(kept)

    def hook(_: Any, __: Any, module: Any, ___: Any, given: dict[str, Any], output: Any) -> Any:
        layer, tokens = given["past_key_values"].layers[module.layer_idx], left.pop(module.layer_idx, None)
        if tokens is not None:
            for name in ("keys", "values"):
                own = getattr(layer, name)
                setattr(layer, name, own.gather(2, tokens[None, :, :, None].expand(-1, -1, -1, own.shape[3])))
        return output

    with _hooked(press, hook):
        yield


@contextmanager
def _hooked(press: type, hook: Callable[..., Any]) -> Iterator[None]:
    """Puts a function around the hook of all presses of a class; it gets that hook first."""
    own: Any = press.forward_hook  # type: ignore[attr-defined]
    press.forward_hook = lambda self, *given: hook(own, self, *given)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        press.forward_hook = own  # type: ignore[attr-defined]


def of_sentences(program: ModuleType, folder: str) -> Maps:
    """Each text by itself, without padding."""
    model = program.load(folder).double()
    model[0].auto_model.set_attn_implementation("eager")
    maps = []
    for text in program.TEXTS:
        with returned(model) as found:
            model.encode([text])
        maps.append([array(pieces[0][0]) for pieces in found.values()])
    return maps


def of_finetune(program: ModuleType, folder: str) -> Maps:
    """At each step of the training, a copy of the model in float64 reads what the model is given."""
    trainer, maps = program.load(folder), Maps()

    def read(model: Any, args: Any, given: dict[str, Any]) -> None:
        if not model.training:  # a scan of SinkCallback
            return
        plain = eager(_copy(model))
        with torch.no_grad():
            found = plain(given["input_ids"], attention_mask=given["attention_mask"], output_attentions=True)
        for row, tokens in enumerate(given["attention_mask"].sum(1).tolist()):
            maps.append([array(each[row, :, :tokens, :tokens]) for each in found.attentions])

    trainer.model.register_forward_pre_hook(read, with_kwargs=True)
    program.work(trainer)
    return maps


def _copy(model: nn.Module) -> nn.Module:
    """A copy in eval mode, without the hook that asks for it and without what a trainer puts around `forward`, which
    may run the model that was copied."""
    found = copy.deepcopy(model).eval()
    found._forward_pre_hooks.clear()
    vars(found).pop("forward", None)
    return found


# The maps of other libraries


def of_lens(program: ModuleType, folder: str) -> Maps:
    """`run_with_cache` keeps the patterns."""
    model = program.load(folder).to(torch.float64)
    with torch.no_grad():
        _, cache = model.run_with_cache(model.to_tokens(program.TEXT))
    return [[array(cache[f"blocks.{layer}.attn.hook_pattern"][0]) for layer in range(model.cfg.n_layers)]]


def of_vit(program: ModuleType) -> Maps:
    """timm's unfused attention gives its map to a dropout."""
    model, found = program.load().double(), list[Tensor]()
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _, given, __: found.append(given[0]))
    pictures = torch.randn(3, 3, 98, 98, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        model(pictures.double())
    return [[array(each[row]) for each in found] for row in range(len(pictures))]


def of_dit(program: ModuleType) -> Maps:
    """The scores of diffusers' plain attention at the last step, which is given the picture that the program gave."""
    from diffusers.models.attention_processor import Attention, AttnProcessor

    model, given = program.load(), dict[str, Any]()

    def note(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        given.update(kwargs, picture=args[0])

    with model.register_forward_pre_hook(note, with_kwargs=True):
        program.work(model, label=lambda _: None)
    model.double()
    found: list[Tensor] = []
    for module in model.modules():
        if isinstance(module, Attention):
            module.set_processor(AttnProcessor())
            module.get_attention_scores = _noting(module.get_attention_scores, found)
    with torch.no_grad():
        model(given.pop("picture").double(), **given)
    return [[array(each) for each in found]]


def _noting(function: Callable[..., Tensor], found: list[Tensor]) -> Callable[..., Tensor]:
    def noting(*args: Any, **kwargs: Any) -> Tensor:
        found.append(function(*args, **kwargs))
        return found[-1]

    return noting


def of_memory_keys(program: ModuleType) -> Maps:
    """x-transformers' own intermediates in one pass over prompt and answer, without the columns of its memory keys."""
    text = program.work(program.load())[:, :-1]
    plain = program.load(flash=False).double()
    with torch.no_grad():
        _, between = plain(text, return_intermediates=True)
    maps = [each.post_softmax_attn[0] for each in between.attn_intermediates]
    return [[array(each[..., each.shape[-1] - text.shape[1] :]) for each in maps]]


def of_nano(program: ModuleType) -> Maps:
    """A copy of the model as it is at step 40, in float64, with the softmax written out."""
    model, found, step = program.load(), list[Tensor](), [0]

    def attend(query: Tensor, key: Tensor, value: Tensor, is_causal: bool) -> Tensor:
        later = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).triu(1)
        logits = query @ key.mT * query.shape[-1] ** -0.5
        found.append(logits.masked_fill(later, -torch.inf).softmax(-1))
        return found[-1] @ value

    def read(model: nn.Module, args: Any) -> None:
        if step[0] == 40:
            own, program.scaled_dot_product_attention = program.scaled_dot_product_attention, attend
            with torch.no_grad():
                _copy(model).double()(*args)
            program.scaled_dot_product_attention = own
        step[0] += 1

    model.register_forward_pre_hook(read)
    program.work(model, lambda _: None)
    return [[array(each[0]) for each in found]]
