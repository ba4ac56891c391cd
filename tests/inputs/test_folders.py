"""Folders of pictures and recordings that the model's own processor cannot read, and what it can."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import make_tokenizer
from PIL import Image
from scipy.io import wavfile
from transformers import (
    CLIPImageProcessor,
    LlavaProcessor,
    Wav2Vec2FeatureExtractor,
)

from sinkscope import SinkscopeError
from sinkscope.inputs.images import processed, read_folder
from sinkscope.inputs.sound import read_wav, sound_features

RATE = 16000


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    folder = tmp_path / "pictures"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "a.png")
    return folder


def test_a_grey_picture_of_16_bits_keeps_its_levels(tmp_path: Path) -> None:
    levels = np.linspace(0, 65_535, 64).reshape(8, 8)
    Image.fromarray(levels.astype(np.uint16)).save(tmp_path / "deep.png")
    Image.fromarray((levels / 257).round().astype(np.uint8)).save(tmp_path / "flat.png")
    read = read_folder(tmp_path, None)
    np.testing.assert_allclose(np.asarray(read["deep.png"], float), np.asarray(read["flat.png"], float), atol=1)


def test_a_picture_is_turned_as_its_camera_says(tmp_path: Path) -> None:
    from transformers.image_utils import load_image

    pixels = np.random.default_rng(0).integers(0, 255, (8, 16, 3), dtype=np.uint8)
    turned = Image.Exif()
    turned[0x0112] = 6  # the orientation of a picture that was taken upright
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=turned)
    found = read_folder(tmp_path, None)["a.png"]
    assert found.size == (8, 16)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(load_image(str(tmp_path / "a.png"))))


def llava(folder: Path, template: str | None = None) -> dict[str, Any]:
    """Where a LLaVA's processor is loaded from."""
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        images, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1,
        chat_template=template,
    ).save_pretrained(folder)  # fmt: skip
    return {"pretrained_model_name_or_path": str(folder)}


TEMPLATE = (
    "{% for message in messages %}{% for part in message.content %}"
    "{{ '<image>' if part.type == 'image' else part.text + '!' }}{% endfor %}{% endfor %}"
)
"""As a chat template does: it writes the image token and marks of its own around the text."""


def test_a_chat_template_writes_the_prompt(picture: Path, tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    for template, mark in ((None, ""), (TEMPLATE, "!")):
        origin = llava(tmp_path / f"processor{mark}", template)
        (given,) = processed(picture, "What is this?", 1, origin, alone=False)
        assert given["pixel_values"].shape == (1, 3, 32, 32)
        text = tokenizer.decode(given["input_ids"][0].tolist()[-20:])
        assert text.endswith("What is this?" + mark)


def test_pictures_need_a_processor_of_pictures(picture: Path, tiny_folder: Path) -> None:
    origin = {"pretrained_model_name_or_path": str(tiny_folder)}
    with pytest.raises(SinkscopeError, match="a model object has no processor; give pixel_values"):
        processed(picture, None, 1, {}, alone=True)
    with pytest.raises(SinkscopeError, match="--images: no usable processor: "):
        processed(picture, None, 1, origin, alone=True)
    with pytest.raises(SinkscopeError, match="the checkpoint has no processor for text with pictures"):
        processed(picture, None, 1, origin, alone=False)


def test_a_processor_that_names_its_pictures_otherwise(
    picture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Fuyu's, which returns image_patches."""
    whole = LlavaProcessor.__call__

    def other(self: Any, *args: Any, **kwargs: Any) -> Any:
        given = whole(self, *args, **kwargs)
        given["image_patches"] = given.pop("pixel_values")
        return given

    monkeypatch.setattr(LlavaProcessor, "__call__", other)
    with pytest.raises(SinkscopeError, match="processor cannot read these pictures: it returns no pixel_values"):
        processed(picture, None, 1, llava(tmp_path / "processor"), alone=False)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    folder = tmp_path / "recordings"
    folder.mkdir()
    wavfile.write(folder / "a.wav", RATE, np.linspace(-0.5, 0.5, 800, dtype=np.float32))
    return folder


def test_recordings_need_an_extractor_of_sound(recording: Path, tiny_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(SinkscopeError, match="a model object has no feature extractor; give input_values"):
        sound_features(recording, 1, {}, "input_values")
    with pytest.raises(SinkscopeError, match="--audio: no usable feature extractor: "):
        sound_features(recording, 1, {"pretrained_model_name_or_path": str(tiny_folder)}, "input_values")
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path / "extractor")
    origin = {"pretrained_model_name_or_path": str(tmp_path / "extractor")}
    with pytest.raises(SinkscopeError, match="feature extractor cannot read these recordings: 'input_features'"):
        sound_features(recording, 1, origin, "input_features")


def test_frames_that_the_extractor_marks_as_padding_are_left_out(recording: Path, tmp_path: Path) -> None:
    """And samples of float32, in -1..1, are read as they are."""
    sound = read_wav(recording / "a.wav", RATE)
    assert np.array_equal(sound, np.linspace(-0.5, 0.5, 800, dtype=np.float32))
    padded = Wav2Vec2FeatureExtractor(do_normalize=False, return_attention_mask=True)
    padded.save_pretrained(tmp_path / "extractor")
    origin = {"pretrained_model_name_or_path": str(tmp_path / "extractor")}
    assert np.array_equal(sound_features(recording, 1, origin, "input_values"), sound[None])


def test_an_extractor_that_names_no_sampling_rate(recording: Path, tmp_path: Path) -> None:
    Wav2Vec2FeatureExtractor(sampling_rate=None).save_pretrained(tmp_path / "extractor")
    with pytest.raises(SinkscopeError, match="the checkpoint's feature extractor reads no sound"):
        sound_features(recording, 1, {"pretrained_model_name_or_path": str(tmp_path / "extractor")}, "input_values")
