"""sinkscope.watch over the caches of encoder-decoders that form their attention maps in their own code.

Steps are held against one pass over all tokens, and against the maps that the model returns of each text alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from models import VOCABULARY
from tiers import slow_but
from torch import Tensor
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    FSMTConfig,
    FSMTForConditionalGeneration,
    LEDConfig,
    LEDForConditionalGeneration,
)
from writers import CACHE

import sinkscope

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")

SIZES = {
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def fsmt() -> Any:
    """Puts time first in its decoder."""
    config = FSMTConfig(
        langs=["en", "de"], src_vocab_size=VOCABULARY, tgt_vocab_size=VOCABULARY, max_position_embeddings=99,
        bos_token_id=1, **SIZES,
    )  # fmt: skip
    return FSMTForConditionalGeneration(config)


def led() -> Any:
    """Its encoder attends in bands, which are not read."""
    config = LEDConfig(
        vocab_size=VOCABULARY, attention_window=4, max_encoder_position_embeddings=99,
        max_decoder_position_embeddings=99, **SIZES,
    )  # fmt: skip
    return LEDForConditionalGeneration(config)


def made(make: Any) -> Any:
    if make is fsmt:
        pytest.importorskip("transformers", minversion="5.24", reason="before, its steps took the first position")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
    model.generation_config.eos_token_id = None
    return model


def texts(right: int = 0) -> tuple[Tensor, Tensor]:
    """Two texts of 16 tokens, of which the second has `right` of padding behind it, and their mask."""
    ids = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    ids[1, 16 - right :], mask[1, 16 - right :] = 0, 0
    return ids, mask


@pytest.mark.parametrize("right", slow_but([0, 5], 5))
@pytest.mark.parametrize("make", slow_but([fsmt, led], fsmt))
def test_generation_over_a_padded_encoder_is_read(make: Any, right: int) -> None:
    model, (ids, mask) = made(make), texts(right)
    given = {"input_ids": ids, "attention_mask": mask, "max_length": 10, "do_sample": False, "num_beams": 1}
    unwatched = model.generate(**given)
    with sinkscope.watch(model) as seen:
        written = model.generate(**given)
    assert torch.equal(unwatched, written)
    assert [why for why in seen.left_out if "longformer" not in why] == []
    table = seen.run().sequences.dropna(subset="head")
    for row in range(2):
        text = ids[row : row + 1, mask[row].bool()]
        with torch.no_grad():
            own = model(
                input_ids=text, decoder_input_ids=written[row : row + 1, :-1], output_attentions=True, use_cache=False
            )
        for stream, every in (("decoder", own.decoder_attentions), ("cross", own.cross_attentions)):
            for layer, maps in enumerate(every):
                found = table.query(f"sequence == {row} and stream == '{stream}' and layer == {layer}")
                np.testing.assert_allclose(found["bos_mass"], maps[0, :, 1:, 0].mean(-1), atol=1e-6)


def test_beams_over_time_first_states_are_read() -> None:
    """The cache puts the sequences in another order, and the states have them on the second axis."""
    model, (ids, mask) = made(fsmt), texts()
    with sinkscope.watch(model) as seen:
        model.generate(input_ids=ids, attention_mask=mask, max_length=10, do_sample=False, num_beams=3)
    assert not seen.left_out
    assert seen.run().manifest.data[0].sequences == 6


def stepped(model: Any, text: Tensor, ids: Tensor, mask: Tensor) -> list[Tensor]:
    """The cross-attention maps of each layer over 60 tokens and steps of one, (B, H, T, Tk)."""
    cache, start, maps = EncoderDecoderCache(DynamicCache(), DynamicCache()), 0, list[tuple[Tensor, ...]]()
    with torch.no_grad():
        given = {"encoder_outputs": model.get_encoder()(text), "output_attentions": True, CACHE: cache}
        for stop in range(60, ids.shape[1] + 1):
            own = {"decoder_input_ids": ids[:, start:stop], "decoder_attention_mask": mask[:, :stop]}
            maps.append(model(**own, **given).cross_attentions)
            start = stop
    return [torch.cat(layer, 2).double() for layer in zip(*maps, strict=True)]


@pytest.mark.parametrize("make", slow_but([fsmt, led], fsmt))
def test_the_first_64_queries_of_a_left_padded_decoder_are_its_own(make: Any) -> None:
    """Its cross-attention reaches them in a later step than the batch has 64."""
    model, (text, _) = made(make), texts()
    ids = torch.randint(3, VOCABULARY, (2, 80), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    ids[1, :10], mask[1, :10] = 0, 0
    every = stepped(model, text, ids, mask)
    with sinkscope.watch(model) as seen:
        stepped(model, text, ids, mask)
    positions = seen.run().positions.query("stream == 'cross'")
    for layer, maps in enumerate(every):
        expected = (maps[0, :, :64].mean(1) + maps[1, :, 10:74].mean(1)) / 2
        found = positions[positions["layer"] == layer]["alpha_t64"].to_numpy().reshape(expected.shape)
        np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize(("text", "target"), slow_but([(70, 90), (90, 70)], (70, 90)))
def test_each_side_has_a_length_curve_up_to_its_own_length(text: int, target: int) -> None:
    model = made(fsmt)
    draw = torch.Generator().manual_seed(1)
    given = {
        "input_ids": torch.randint(3, VOCABULARY, (2, text), generator=draw),
        "decoder_input_ids": torch.randint(3, VOCABULARY, (2, target), generator=draw),
    }
    with sinkscope.watch(model) as seen, torch.no_grad():
        own = model(**given, output_attentions=True, use_cache=False)
    curve = seen.run().length_curve.query("layer == 0")
    sides = {"encoder": own.encoder_attentions, "decoder": own.decoder_attentions, "cross": own.cross_attentions}
    for stream, maps in sides.items():
        found = curve[curve["stream"] == stream].set_index(["length", "head"])["bos_mass"]
        lengths = [64, maps[0].shape[2]]
        assert found.index.unique("length").tolist() == lengths
        for length in lengths:
            np.testing.assert_allclose(found[length], maps[0][:, :, 1:length, 0].mean((0, 2)), atol=1e-6)
