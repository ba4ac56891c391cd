"""Text that a model reads beside pictures is text: its padding is cut, and its cache is followed."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch
from families import tiny_config, tiny_model
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    BlipForConditionalGeneration,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedModel,
)
from writers import CACHE

import sinkscope
from sinkscope.capture.sites import stream_of

COLUMNS = ["bos_mass", "sink_score", "entropy", "self_mass"]


def blip() -> Any:
    torch.manual_seed(0)
    model = BlipForConditionalGeneration._from_config(tiny_config("blip")).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def values(run: sinkscope.Run, stream: str, sequence: int) -> pd.DataFrame:
    rows = run.sequences.query("stream == @stream and head >= 0 and sequence == @sequence")
    return rows.set_index(["layer", "head"])[COLUMNS]


def same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    assert len(a)
    pd.testing.assert_frame_equal(a, b, atol=1e-5, rtol=1e-5)


def test_padded_captions_are_measured_as_if_alone() -> None:
    model, ids, pixels = blip(), torch.randint(10, 90, (2, 18)), torch.randn(2, 3, 32, 32)
    mask = torch.ones_like(ids)
    mask[1, 10:] = 0
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(pixel_values=pixels, input_ids=ids, attention_mask=mask)
    with torch.no_grad(), sinkscope.watch(model) as alone:
        model(pixel_values=pixels[1:], input_ids=ids[1:, :10], attention_mask=mask[1:, :10])
    both, one = seen.run(), alone.run()
    for stream in ("text", "cross", "vision"):
        same(values(both, stream, 1), values(one, stream, 0))


def test_a_generation_over_a_cache_that_is_wrapped_anew_in_each_pass_is_one_sequence() -> None:
    model, pixels = blip(), torch.randn(1, 3, 32, 32)
    with torch.no_grad(), sinkscope.watch(model.text_decoder) as seen:
        written = model.generate(pixel_values=pixels, max_new_tokens=8, min_new_tokens=8, do_sample=False)
    with torch.no_grad(), sinkscope.watch(model.text_decoder) as whole:
        encoded = model.vision_model(pixels).last_hidden_state
        model.text_decoder(input_ids=written[:, :-1], encoder_hidden_states=encoded)
    assert seen.left_out == []
    for stream in ("text", "cross"):
        same(values(seen.run(), stream, 0), values(whole.run(), stream, 0))


def test_a_generation_behind_a_picture_is_one_sequence() -> None:
    """GIT puts the picture's positions before the tokens, and reads the picture in the first pass alone."""
    model = tiny_model(AutoModelForCausalLM, "git")
    size = model.config.vision_config.image_size
    ids, pixels = torch.randint(10, 90, (2, 6)), torch.randn(2, 3, size, size)
    settings: dict[str, Any] = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with torch.no_grad(), sinkscope.watch(model) as seen:
        written = model.generate(input_ids=ids, pixel_values=pixels, **settings)
    with torch.no_grad(), sinkscope.watch(model) as whole:
        model(input_ids=written[:, :-1], pixel_values=pixels)
    assert seen.left_out == []
    for stream in ("text", "vision"):
        for sequence in range(2):
            same(values(seen.run(), stream, sequence), values(whole.run(), stream, sequence))


def test_a_tower_with_as_many_heads_as_the_text_has_tokens_is_read() -> None:
    """As attention over layers, it has as many heads as positions; unlike that, its heads are no stream's width."""
    model = blip()
    assert model.config.vision_config.num_attention_heads == 4
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(pixel_values=torch.randn(2, 3, 32, 32), input_ids=torch.randint(10, 90, (2, 4)))
    assert {*seen.run().layers["stream"]} == {"text", "vision", "cross"}


def test_tokens_are_taken_back_behind_a_picture() -> None:
    """The picture was read in the first pass alone: its tower has no rows of the others."""
    text = LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, vocab_size=30, pad_token_id=0
    )
    vision = CLIPVisionConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=16
    )
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_id=29, image_seq_length=4)
    model, cache = LlavaForConditionalGeneration(config).eval(), DynamicCache()
    ids, pixels = torch.tensor([[5, 6, 29, 29, 29, 29, 7, 8, 9]]), torch.randn(1, 3, 32, 32)
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(input_ids=ids[:, :7], pixel_values=pixels, **{CACHE: cache})
        model(input_ids=torch.cat([ids[:, 7:8], ids[:, :1]], 1), **{CACHE: cache})
        cache.crop(-1)
        model(input_ids=ids[:, 8:], **{CACHE: cache})
    with torch.no_grad(), sinkscope.watch(model) as whole:
        model(input_ids=ids, pixel_values=pixels, use_cache=False)
    assert seen.left_out == []
    for stream in ("text", "vision"):
        same(values(seen.run(), stream, 0), values(whole.run(), stream, 0))


def test_more_pictures_than_texts_leave_the_texts_in_the_tables() -> None:
    """The pass that came most often stood there, which was the tower's."""
    model = tiny_model(AutoModelForImageTextToText, "llava")
    size, tower = model.config.vision_config.image_size, model.model.vision_tower
    with torch.no_grad(), sinkscope.watch(model) as seen:
        tower(torch.randn(2, 3, size, size))
        model(torch.randint(10, 90, (1, 12)))
    run = seen.run()
    assert {*run.layers["stream"]} == {"text"}
    (warning,) = run.manifest.warnings
    assert warning.startswith("2 sequences of watched are left out: model.vision_tower.")
    assert warning.endswith("read them, pictures or sound that are not as many as the 1 text")


class Named(PreTrainedModel):
    """A model of a person's own whose main input is a picture's, by its configuration."""

    main_input_name = "pixel_values"

    def __init__(self) -> None:
        super().__init__(tiny_config("vit"))


@pytest.mark.parametrize(
    ("path", "stream"),
    [
        ("activity_layers.0", "vision"),  # by the main input, as no word tells
        ("language_model.layers.0.self_attn", "text"), ("text_decoder.encoder.layer.0", "text"),
        ("vision_tower.blocks.0", "vision"), ("model.visual.blocks.0", "vision"), ("vit.layers.0", "vision"),
        ("speech_encoder.layers.0", "audio"), ("revised.layers.0", "vision"),
    ],
)  # fmt: skip
def test_the_stream_is_told_by_words_of_the_path(path: str, stream: str) -> None:
    assert stream_of(Named(), path, False) == stream


def test_no_part_of_a_word_names_a_stream() -> None:
    assert stream_of(nn.Module(), "activity_layers.0", False) == "text"
    assert stream_of(nn.Module(), "revised_images.0", False) == "vision"


def test_a_generation_without_attention_is_told_of_as_such() -> None:
    model = tiny_model(AutoModelForCausalLM, "mamba")
    ids: Tensor = torch.randint(10, 90, (1, 6))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(sinkscope.SinkscopeError, match="no attention of MambaForCausalLM was read"):
        seen.run()
