"""What stands at a sink: tokens, image tokens, patches, class and register tokens, frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from families import speech_inputs, tiny_config, tiny_model
from models import random_ids
from pictured import FIRST, IMAGE, IMAGE_TOKENS, LENGTH, inputs, see
from tiers import nightly
from transformers import AutoModel

import sinkscope
from sinkscope.runs.run import Run

EVERYWHERE = 0.02
"""An epsilon so small that many places count as sinks: random models have none at 0.3."""


def regions(run: Run, stream: str) -> dict[int, str]:
    """The region of every position with an event, which must be the same in all rows."""
    assert run.sinks is not None
    rows = run.sinks[run.sinks["stream"] == stream]
    assert (rows.groupby("position")["region"].nunique() == 1).all()
    return dict(zip(rows["position"], rows["region"], strict=True))


def scan(model: Any, data: Any, epsilon: float = EVERYWHERE) -> Run:
    return sinkscope.scan(model, data=data, self_check=False, epsilon=epsilon)


@pytest.mark.parametrize(
    ("family", "leading"),
    [
        ("dinov2_with_registers", ["class", "register", "register", "register"]),
        pytest.param("dinov3_vit", ["class", "register", "register", "register"], marks=pytest.mark.slow),
        pytest.param("deit", ["class", "distillation"], marks=pytest.mark.slow),
        pytest.param("siglip_vision_model", [], marks=pytest.mark.slow),
    ],
)
def test_patches_and_what_stands_before_them(family: str, leading: list[str]) -> None:
    model = tiny_model(AutoModel, family)
    if "register" in leading:
        config = tiny_config(family)
        config.num_register_tokens = 3
        torch.manual_seed(0)
        model = AutoModel.from_config(config, dtype=torch.float32).eval()
    run = scan(model, {"pixel_values": torch.randn(2, 3, 32, 32)})
    found = regions(run, "vision")
    assert set(found) == set(range(16 + len(leading)))
    for place, region in found.items():
        assert region == (leading[place] if place < len(leading) else "patch"), place
    assert run.sinks is not None
    assert run.tokens is not None
    assert run.sinks["id"].isna().all()
    assert run.sinks["token"].isna().all()
    rows = run.tokens[run.tokens["kind"] == "attention"].set_index(["region", "first"])
    assert rows.loc[("patch", False), "occurrences"] == 2 * (16 - (not leading))


@pytest.mark.slow
def test_detection_tokens_stand_behind_the_patches() -> None:
    """YOLOS: a class token, 16 patches, and 100 detection tokens. They were called patches."""
    model = tiny_model(AutoModel, "yolos")
    found = regions(scan(model, {"pixel_values": torch.randn(2, 3, 32, 32)}, 0.008), "vision")
    last = 16 + model.config.num_detection_tokens
    assert found.keys() >= {0, 16, 17, last}
    for place, region in found.items():
        assert region == ("class" if place == 0 else "patch" if place <= 16 else "detection"), place


@pytest.mark.slow
def test_class_and_distillation_tokens_stand_before_the_frames() -> None:
    family = "audio-spectrogram-transformer"
    model = tiny_model(AutoModel, family)
    found = regions(scan(model, speech_inputs(family, model.config), 0.008), "audio")
    assert found.keys() >= {0, 1, 2}
    for place, region in found.items():
        assert region == {0: "class", 1: "distillation"}.get(place, "frame"), place


def test_a_parameter_with_more_rows_than_there_are_positions_names_none() -> None:
    model = tiny_model(AutoModel, "siglip_vision_model")
    model.register_tokens = torch.nn.Parameter(torch.zeros(1, 99, 4))
    assert set(regions(scan(model, {"pixel_values": torch.randn(2, 3, 32, 32)}), "vision").values()) == {"patch"}


def test_image_tokens_stand_apart_in_the_text() -> None:
    run = scan(see("llava"), inputs("llava"))
    count, found = IMAGE_TOKENS["llava"], regions(run, "text")
    assert {found.get(place, "image") for place in range(FIRST, FIRST + count)} == {"image"}
    assert {region for place, region in found.items() if not FIRST <= place < FIRST + count} == {"text"}
    assert set(regions(run, "vision").values()) <= {"class", "patch"}
    assert run.tokens is not None
    [row] = run.tokens[(run.tokens["region"] == "image") & (run.tokens["kind"] == "attention")].to_dict("records")
    counted = LENGTH - 16 + 1  # keys 0 .. 8 have 16 rows, and the picture begins at 3
    assert (row["token"], row["id"], row["occurrences"]) == ("image", IMAGE, 2 * (counted - FIRST))


def test_a_decoder_s_sinks_are_its_own_tokens() -> None:
    """Whisper: frames in the encoder and in cross-attention, the given text in the decoder."""
    config = tiny_config("whisper")
    given = speech_inputs("whisper", config)
    given["decoder_input_ids"] = torch.randint(3, 90, (2, 20))
    run = scan(tiny_model(AutoModel, "whisper"), given)
    assert run.sinks is not None
    decoder = run.sinks[(run.sinks["stream"] == "decoder")]
    assert set(decoder["kind"]) >= {"attention"}
    where = decoder["sequence"].to_numpy(), decoder["position"].to_numpy()
    assert (decoder["id"].to_numpy(int) == given["decoder_input_ids"].numpy()[where]).all()
    assert set(run.sinks[run.sinks["stream"] != "decoder"]["region"]) == {"frame"}
    cross = run.sinks[run.sinks["stream"] == "cross"]
    assert len(cross)
    assert cross["cos_first"].isna().all()


@pytest.mark.slow
def test_the_decoder_of_an_encoder_decoder_reads_the_text_shifted() -> None:
    model, ids = tiny_model(AutoModel, "t5"), random_ids(2, 40)
    model.config.decoder_start_token_id = 3
    run = scan(model, ids, 0.01)
    assert run.sinks is not None
    shifted = np.insert(ids[:, :-1].numpy(), 0, 3, axis=1)
    for stream, read in (("encoder", ids.numpy()), ("cross", ids.numpy()), ("decoder", shifted)):
        rows = run.sinks[run.sinks["stream"] == stream]
        assert len(rows)
        assert (rows["id"].to_numpy(int) == read[rows["sequence"], rows["position"]]).all(), stream


def test_positions_are_named_by_what_their_own_stream_reads() -> None:
    """T5's decoder reads the text shifted; its cross-attention has the encoder's keys and the decoder's queries."""
    model, ids = tiny_model(AutoModel, "t5"), random_ids(1, 20)
    model.config.decoder_start_token_id = 3
    run = scan(model, ids)
    text = [str(each) for each in ids[0].tolist()]
    shifted = ["3", *text[:-1]]
    for stream, keys, queries in (("encoder", text, text), ("decoder", shifted, shifted), ("cross", text, shifted)):
        rows = run.positions[(run.positions["stream"] == stream) & (run.positions["head"] == 0)]
        assert rows[rows["layer"] == 0]["token"].tolist() == keys
        summary = run.summary.streams[stream]
        assert [each.token for each in summary.top_positions] == [keys[each.position] for each in summary.top_positions]
        largest = summary.massive_activations
        assert largest.token == (None if largest.position is None else queries[largest.position])


def test_patches_are_not_named_by_the_text_that_is_read_beside_them() -> None:
    given = inputs("llava")
    run = scan(see("llava"), {name: value[:1] for name, value in given.items()})
    vision = run.summary.streams["vision"]
    assert run.positions.loc[run.positions["stream"] == "vision", "token"].isna().all()
    assert all(each.token is None for each in vision.top_positions)
    assert vision.massive_activations.token is None
    assert all(each.token is not None for each in run.summary.streams["text"].top_positions)


@pytest.mark.slow
def test_minilm_sinks_into_its_class_token() -> None:
    """Every [CLS] is a sink of several heads. [SEP] at the end is none at 0.3: its alpha_k stays below 0.1."""
    run = sinkscope.scan("example:minilm", num_sequences=8, self_check=False)
    assert run.tokens is not None
    [row] = run.tokens.to_dict("records")
    assert (row["token"], row["first"], row["region"], row["rate"]) == ("[CLS]", True, "special", 1)
    low = sinkscope.scan("example:minilm", num_sequences=8, seq_len=64, epsilon=0.02, self_check=False).tokens
    assert low is not None
    special = low[(low["region"] == "special") & (low["kind"] == "attention")]
    assert special["token"].tolist() == ["[CLS]", "[SEP]"]
    assert special["rate"].tolist() == [1, 1]


@pytest.mark.slow
@nightly
def test_gemma_s_sinks_without_bos_agree_with_its_mean_alpha() -> None:
    """The mean alpha_k over sequences lies between that of the sinks alone and epsilon more for all others."""
    run = sinkscope.scan("example:gemma-3-270m", num_sequences=4, bos="never", self_check=False)
    assert run.sinks is not None
    rows = run.sinks[run.sinks["kind"] == "attention"]
    keys = ["layer", "head", "position"]
    sums = rows.groupby(keys)["alpha"].agg(["sum", "count"])
    means = run.positions[run.positions["position"] <= 240].set_index(keys)["alpha"]
    both = means.to_frame().join(sums).fillna(0.0)
    least = both["sum"] / 4
    assert (both["alpha"] >= least - 1e-6).all()
    assert (both["alpha"] <= least + 0.3 * (4 - both["count"]) / 4 + 1e-6).all()
    elsewhere = rows[rows["position"] >= 1].groupby(["layer", "head"])["sequence"].nunique() / 4
    expected = elsewhere.reindex(run.heads.set_index(["layer", "head"]).index, fill_value=0.0)
    assert run.heads["sink_elsewhere"].tolist() == expected.tolist()


@pytest.mark.slow
@nightly
def test_gemma_s_bos_is_named_where_it_stands() -> None:
    run = sinkscope.scan(
        "example:gemma-3-270m", num_sequences=2, seq_len=64, first="bos", prepend=8, self_check=False
    )  # fmt: skip
    assert run.sinks is not None
    assert run.tokens is not None
    rows = run.sinks[(run.sinks["kind"] == "attention") & (run.sinks["token"] == "<bos>")]
    assert set(rows["position"]) == {8}
    leading = run.tokens[run.tokens["kind"] == "attention"].iloc[0]
    assert (leading["token"], leading["first"], leading["rate"]) == ("<bos>", False, 1)
    assert leading["sink_share"] > 0.9
