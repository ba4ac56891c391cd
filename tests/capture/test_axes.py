"""Hidden states whose axes stand in another order: time first (FSMT, XLNet) or channels first (SqueezeBERT).

They are held against the same sequences one by one, and against what the model's modules read in float64.
"""

from __future__ import annotations

from copy import deepcopy
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers
from families import tiny_model
from models import random_ids
from tiers import slow_but
from torch import Tensor, nn
from transformers.models.fsmt import modeling_fsmt

import sinkscope
from sinkscope.capture.axes import by_sequence_and_position, in_one_order
from sinkscope.capture.steps import _of_one_size
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward

WIDTH, HEADS = 32, 4
KINDS = {
    "fsmt": transformers.AutoModelForSeq2SeqLM,
    "xlnet": transformers.AutoModelForCausalLM,
    "squeezebert": transformers.AutoModelForMaskedLM,
}


@pytest.fixture(autouse=True)
def _fsmt_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSMT's own function fills a mask through float32, which overflows."""
    monkeypatch.setattr(modeling_fsmt, "fill_with_neg_inf", lambda mask: torch.full_like(mask, -1e30))


@cache
def model_of(family: str) -> nn.Module:
    return tiny_model(KINDS[family], family)  # type: ignore[no-any-return]


def padded(length: int) -> dict[str, Tensor]:
    """Three sequences, of which the second has three tokens less."""
    ids = random_ids(3, length)
    mask = torch.ones_like(ids)
    ids[1, length - 3 :], mask[1, length - 3 :] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def read_in(model: nn.Module, path: str, ids: Tensor) -> Tensor:
    """What the module at `path` reads in float64, as the model's own code gives it."""
    exact = deepcopy(wrap_model(model).model).double()
    seen: list[Tensor] = []

    def keep(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["query"])

    handle = exact.get_submodule(path).register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        Forward(exact)(ids)
    handle.remove()
    return seen[0]


def first_cosine(z: Tensor) -> float:
    """cos_first_input of [B, T, D]."""
    return float(torch.cosine_similarity(z[:, :1], z[:, 1:], dim=-1).mean())


@pytest.mark.parametrize("family", slow_but(["fsmt", "xlnet"], "fsmt"))
def test_batches_with_time_first_are_read_as_one_by_one(family: str) -> None:
    several, one = (sinkscope.scan(model_of(family), data=padded(12), batch_size=size) for size in (3, 1))
    for name in ("heads", "layers", "sequences"):
        table, expected = getattr(several, name), getattr(one, name)
        pd.testing.assert_frame_equal(table, expected, rtol=1e-4, atol=1e-5, obj=name)
    own = several.layers[several.layers["stream"] != "cross"]
    assert own[["cos_first_residual", "cos_first_input"]].notna().all(axis=None)
    assert several.heads["honor"].notna().all() == (family == "fsmt")  # XLNet's output projection is no layer


def test_the_norms_of_fsmt_s_heads_are_those_of_float64() -> None:
    model, ids = model_of("fsmt"), random_ids(3, 12)
    run = sinkscope.scan(model, data=ids, batch_size=3)
    for path in run.heads["module"].unique():
        read = read_in(model, f"{path}.out_proj", ids).unflatten(-1, (HEADS, -1)).norm(dim=-1).mean(0)
        found = run.heads[run.heads["module"] == path].sort_values("head")
        np.testing.assert_allclose(found["honor"], (read / read.mean(-1, keepdim=True)).mean(0), rtol=1e-4)
    for path in run.layers.query("stream != 'cross'")["module"]:
        found = run.layers.loc[run.layers["module"] == path, "cos_first_input"]
        np.testing.assert_allclose(found, first_cosine(read_in(model, path, ids).transpose(0, 1)), atol=1e-5)


@pytest.mark.parametrize("length", slow_but([12, WIDTH], WIDTH))
@pytest.mark.parametrize("watched", [False, True])
def test_channels_before_positions_are_read_also_where_both_are_as_many(watched: bool, length: int) -> None:
    model, ids = model_of("squeezebert"), random_ids(2, length)
    if watched:
        with torch.no_grad(), sinkscope.watch(model) as seen:
            model(ids)
        run = seen.run()
    else:
        run = sinkscope.scan(model, data=ids)
    for path, found in zip(run.layers["module"], run.layers["cos_first_input"], strict=True):
        inner = path.removeprefix("transformer.")
        expected = first_cosine(read_in(model, inner, ids).mT)
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_steps_with_time_first_are_read_as_one_pass() -> None:
    """Against what the decoder's own modules read in the steps: transformers 5.17 gives each step of FSMT's the first
    position, so that its steps compute something else than one pass does."""
    seq2seq: Any = model_of("fsmt")
    pieces: dict[str, list[Tensor]] = {}
    handles = [
        module.self_attn.register_forward_pre_hook(
            lambda _, args, kwargs, path=f"{path}.self_attn": pieces.setdefault(path, []).append(kwargs["query"]),
            with_kwargs=True,
        )
        for path, module in seq2seq.named_modules()
        if isinstance(module, modeling_fsmt.DecoderLayer)
    ]
    with sinkscope.watch(seq2seq) as seen:
        seq2seq.generate(input_ids=random_ids(2, 8), max_length=10, min_length=10, do_sample=False, num_beams=1)
    for handle in handles:
        handle.remove()
    layers = seen.run().layers.query("stream == 'decoder'").set_index("module")
    assert set(layers.index) == set(pieces)
    for path, read in pieces.items():
        assert [piece.shape[:2] for piece in read] == [(1, 2)] * 9
        expected = first_cosine(torch.cat(read).double().transpose(0, 1))
        for name in ("cos_first_input", "cos_first_residual"):  # FSMT has no norm before its attention
            np.testing.assert_allclose(layers.loc[path, name], expected, atol=1e-6)


def test_orders_that_sizes_do_not_show_are_left_out() -> None:
    plain, turned = torch.randn(3, 12, 8), torch.randn(12, 3, 8)
    assert by_sequence_and_position(plain, (3, 12), None) is plain
    assert torch.equal(by_sequence_and_position(turned, (3, 12), None), turned.transpose(0, 1))
    assert by_sequence_and_position(torch.randn(3, 8, 12), (3, 12), None) is None, "a memory may be as wide"
    assert by_sequence_and_position(torch.randn(3, 12, 12), (3, 12), None) is None
    channels = torch.randn(3, 12, 12)
    assert torch.equal(by_sequence_and_position(channels, (3, 12), False), channels.mT)
    pieces = [torch.randn(5, 2, 8), torch.randn(2, 2, 8), torch.randn(1, 2, 8)]
    ordered = in_one_order(pieces, [(2, 5), (2, 2), (2, 1)], None)
    for found, piece in zip(ordered, pieces, strict=True):
        assert torch.equal(found, piece.transpose(0, 1))


def test_passes_of_the_same_sizes_are_turned_together() -> None:
    prompt, steps = torch.randn(5, 2, 8), torch.randn(7, 1, 2, 8)
    ordered = in_one_order([prompt[None], steps], [(2, 5), (2, 1)], None)
    assert torch.equal(ordered[0], prompt[None].transpose(1, 2))
    assert torch.equal(ordered[1], steps.transpose(1, 2))
    channels = torch.randn(7, 2, 8, 3)
    assert torch.equal(in_one_order([channels], [(2, 3)], False)[0], channels.mT)


def test_passes_of_other_sizes_are_parted() -> None:
    """The sizes of tensors do not tell how many sequences and tokens a pass had."""
    prompt, steps, last = torch.randn(1, 5, 8), torch.randn(3, 2, 8), torch.randn(2, 1, 8)
    sizes = [(1, 5), (2, 1), (2, 1), (1, 2), (1, 1), (1, 1)]
    stacks, found = _of_one_size([prompt[None], steps[:, None], last[:, None]], sizes)
    assert found == [(1, 5), (2, 1), (2, 1), (1, 2), (1, 1)]
    assert [len(stack) for stack in stacks] == [1, 1, 1, 1, 2]
    assert torch.equal(torch.cat(stacks[1:4])[:, 0], steps)
