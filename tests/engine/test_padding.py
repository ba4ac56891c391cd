"""Padding, packing and half precision: a sequence's columns do not depend on what else is in its batch."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from exact import assert_close, table
from families import tiny_model
from models import FAMILIES, random_ids, tiny
from tiers import slow_but
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMultimodalLM

import sinkscope
from sinkscope.capture import Capture, LayerView, Site, plan
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.map_walk import AttentionMap
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.self_check import dense_map
from sinkscope.metrics import registered
from sinkscope.runs.per_sequence import counted

EVERY = registered().asked(())
LENGTHS = (70, 41)
FAST_PADDING = (("left", "llama"), ("right", "bloom"))


def model_of(family: str) -> Any:
    return tiny_model(AutoModelForCausalLM, "bloom") if family == "bloom" else tiny(family)


def sequences() -> list[Tensor]:
    return [random_ids(1, length, seed=length)[0] for length in LENGTHS]


def padded(rows: list[Tensor], side: str) -> dict[str, Tensor]:
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for number, row in enumerate(rows):
        place = slice(ids.shape[1] - len(row), None) if side == "left" else slice(0, len(row))
        ids[number, place], mask[number, place] = row, 1
    return {"input_ids": ids, "attention_mask": mask}


def assert_same(run: sinkscope.Run, number: int, row: Tensor, model: Any, label: str) -> None:
    """Every column of sequence `number` is what `row` gives alone, within 1e-5."""
    alone = sinkscope.scan(model, data=row[None], self_check=False).sequences
    both = run.sequences[run.sequences["sequence"] == number].reset_index(drop=True)
    for name in [*EVERY.names("heads"), *EVERY.names("layers")]:
        ours, expected = both[name].to_numpy(float), alone[name].to_numpy(float)
        assert_close(ours, expected, f"{label} {name}", 1e-5, 1e-5)


@pytest.mark.parametrize("side", slow_but(["left", "right"], "left"))
def test_seq_len_counts_tokens_and_no_padding(side: str) -> None:
    """The first tokens of each sequence are read, wherever its padding stands."""
    model, rows = tiny("llama"), sequences()
    run = sinkscope.scan(model, data=padded(rows, side), seq_len=35, self_check=False)
    assert run.summary.streams["text"].tokens_per_sequence == 35
    for number, row in enumerate(rows):
        assert_same(run, number, row[:35], model, f"{side}, sequence {number}")


@pytest.mark.parametrize(("side", "family"), slow_but(product(("left", "right"), (*FAMILIES, "bloom")), *FAST_PADDING))
def test_padding_counts_nowhere(family: str, side: str) -> None:
    """Unequal sequences padded into one batch give what each gives alone. Bloom's attention is inline."""
    model, rows = model_of(family), sequences()
    run = sinkscope.scan(model, data=padded(rows, side), batch_size=2, self_check=False)
    for number, row in enumerate(rows):
        assert_same(run, number, row, model, f"{family} {side}")


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["bart", "llama4_text"], "llama4_text"))
def test_positions_that_count_padding(family: str) -> None:
    """BART embeds the place in the row, and Llama-4 scales queries by it: neither takes position ids for that."""
    sizes: dict[str, Any] = {"vocab_size": 97, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1}
    if family == "bart":
        sizes |= {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in
                  (("layers", 1), ("attention_heads", 2), ("ffn_dim", 24))} | {"d_model": 16}  # fmt: skip
    else:
        sizes |= {"hidden_size": 16, "intermediate_size": 24, "intermediate_size_mlp": 24, "num_hidden_layers": 2,
                  "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_local_experts": 2,
                  "attention_chunk_size": 32, "floor_scale": 4, "no_rope_layers": [0, 1]}  # fmt: skip
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model(family, initializer_range=0.3, **sizes)).eval()
    rows = sequences()
    run = sinkscope.scan(model, data=padded(rows, "left"), batch_size=2, self_check=False)
    for number, row in enumerate(rows):
        assert_same(run, number, row, model, family)


@pytest.mark.skipif("omniasr" not in CONFIG_MAPPING, reason="this transformers has no omniasr")
def test_a_mask_that_a_model_hands_on_without_naming_it_is_given() -> None:
    """OmniASR's forward takes it through **kwargs, for its language model."""
    model, rows = tiny_model(AutoModelForMultimodalLM, "omniasr"), sequences()
    given: list[Tensor | None] = []
    base: Any = wrap_model(model).model
    base.language_model.register_forward_pre_hook(
        lambda module, args, kwargs: given.append(kwargs.get("attention_mask")), with_kwargs=True
    )
    batch = padded(rows, "right")
    run = sinkscope.scan(model, data=batch, batch_size=2, self_check=False)
    assert given[-1] is not None
    assert torch.equal(given[-1], batch["attention_mask"])
    for number, row in enumerate(rows):
        assert_same(run, number, row, model, "omniasr")


def test_lists_of_unequal_length_are_padded_and_masked() -> None:
    model = tiny("llama")
    rows = [random_ids(1, 30)[0].tolist(), random_ids(1, 20, seed=5)[0].tolist()]
    run = sinkscope.scan(model, data=rows, batch_size=2, self_check=False)
    alone = sinkscope.scan(model, data=[rows[1]], self_check=False)
    assert counted(run, run.manifest.data[0]) == "2 sequences of 20 to 30 tokens"
    assert counted(alone, alone.manifest.data[0]) == "1 sequence of 20 tokens"
    own = run.sequences[(run.sequences["sequence"] == 1) & run.sequences["head"].notna()]
    expected = alone.sequences[alone.sequences["head"].notna()]
    assert_close(own["bos_mass"].to_numpy(), expected["bos_mass"].to_numpy(), "bos_mass", 1e-5, 1e-6)
    positions = run.positions
    assert positions.groupby(["layer", "head"])["position"].max().eq(29).all()
    assert positions["alpha"].notna().all()


def test_masks_with_holes_are_refused() -> None:
    ids = random_ids(1, 6)
    mask = torch.tensor([[1, 1, 0, 1, 1, 1]])
    with pytest.raises(sinkscope.SinkscopeError, match="holes"):
        sinkscope.scan(tiny("llama"), data={"input_ids": ids, "attention_mask": mask})


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "mistral", "gpt2", "bloom"], "bloom"))
def test_packed_pieces_are_sequences_of_their_own(family: str) -> None:
    model, (long, short) = model_of(family), sequences()
    ids = torch.stack([torch.cat([short, long]), torch.cat([long, short])])
    positions = torch.stack([
        torch.cat([torch.arange(41), torch.arange(70)]),
        torch.cat([torch.arange(70), torch.arange(41)]),
    ])  # fmt: skip
    run = sinkscope.scan(model, data={"input_ids": ids, "position_ids": positions}, self_check=False)
    assert run.summary.sequences == 4
    for number, row in enumerate((short, long, long, short)):
        assert_same(run, number, row, model, f"{family} packed")


@pytest.mark.slow
def test_a_packed_pass_of_the_model_s_own_gives_the_same_mass() -> None:
    """Without a mask and a cache, transformers itself keeps packed pieces apart: its eager maps are the reference."""
    rows = sequences()
    ids = torch.cat(rows)[None]
    positions = torch.cat([torch.arange(len(row)) for row in rows])[None]
    run = sinkscope.scan(tiny("llama"), data={"input_ids": ids, "position_ids": positions}, self_check=False)
    with torch.no_grad():
        maps = tiny("llama", "eager")(
            input_ids=ids, position_ids=positions, use_cache=False, output_attentions=True
        ).attentions
    found = table(run, ["bos_mass"], heads=True)["bos_mass"]
    for layer, probabilities in enumerate(maps):
        assert float(probabilities[0, :, 70:, :70].abs().max()) == 0.0
        expected = [probabilities[0, :, 1:70, 0].mean(-1), probabilities[0, :, 71:, 70].mean(-1)]
        assert_close(found[:, layer], torch.stack(expected).numpy(), f"layer {layer}", 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("positions", "words"),
    [
        ([[0, 1, 2, 0, 1, 3]], "count up from 0"),
        ([[1, 2, 3, 4, 5, 6]], "count up from 0"),
        ([[0, 1, 2, 3, 4, 0]], "at least 2 tokens"),
        ([[0, 1, 2]], "differ in shape"),
        ([[[0, 1, 2, 3, 4, 5]]], "position_ids"),
    ],
)
def test_positions_that_pack_nothing_are_refused(positions: list[Any], words: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(tiny("llama"), data={"input_ids": random_ids(1, 6), "position_ids": positions})


def test_packing_beside_padding_is_refused() -> None:
    data = {"input_ids": random_ids(1, 6), "position_ids": torch.arange(6)[None], "attention_mask": torch.ones(1, 6)}
    with pytest.raises(sinkscope.SinkscopeError, match="position_ids or attention_mask, not both"):
        sinkscope.scan(tiny("llama"), data=data)


HALF = {torch.bfloat16: 3e-3, torch.float16: 4e-4}
"""How far a half-precision model's mean BOS masses may stand from the float32 model's (measured: 9.4e-4 and 1.1e-4)."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "dtype"),
    slow_but(
        product(["llama", "mistral", "gpt2", "gemma2", "bert"], HALF),
        ("llama", torch.bfloat16),
    ),
)
def test_half_precision_is_summed_in_float32(family: str, dtype: torch.dtype) -> None:
    """The sums are float64's over the same half-precision queries and keys; the rest is the model's own rounding."""
    half, ids = tiny(family).to(dtype), random_ids(2, 90)
    forward, exact, ours = Forward(half), {}, {}

    def see(site: Site, call: AttentionCall | AttentionMap) -> None:
        exact[site.name] = dense_map(call)

    def keep(view: LayerView, row: int) -> None:
        ours[view.site.name] = view.attention

    with Capture(half, plan(half, lambda: forward(ids[:1, :16])), keep, 0.3, on_call=see).watching():
        forward(ids)
    for name, probabilities in exact.items():
        assert ours[name].first.dtype == ours[name].columns.dtype == torch.float32
        assert float((ours[name].first - probabilities[..., 0]).abs().max()) < 1e-5
        assert float((ours[name].columns - probabilities.sum(-2)).abs().max()) < 1e-4
    masses = [
        table(sinkscope.scan(model, data=ids, self_check=False), ["bos_mass"], heads=True)["bos_mass"].mean(0)
        for model in (half, tiny(family))
    ]
    apart = float(np.abs(masses[0] - masses[1]).max())
    assert 0 < apart < HALF[dtype]
