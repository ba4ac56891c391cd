"""Speech models on recordings: tensors passed in Python, and a folder of wav files through the feature extractor."""

from __future__ import annotations

import json
import shutil
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import Refused, Scan, make_tokenizer
from families import speech_inputs, tiny_config, tiny_model
from maps import columns
from transformers import AutoModel, Wav2Vec2FeatureExtractor, WhisperFeatureExtractor

import sinkscope
from sinkscope.checkpoints.tokenizers import language_and_task
from sinkscope.inputs.sound import decoder_ids, read_wav

RATE = 16000
START = 1


def write_wav(path: Path, samples: np.ndarray, rate: int = RATE) -> None:
    """16-bit PCM, [sample] or [sample, channel]."""
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1 if samples.ndim == 1 else samples.shape[1])
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())


@pytest.fixture
def recordings(tmp_path: Path) -> Path:
    """Three recordings of different lengths, one of them in stereo, and a file that is none."""
    folder = tmp_path / "recordings"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, shape in (("b.wav", (9000,)), ("a.WAV", (6400, 2)), ("c.wav", (8000,))):
        write_wav(folder / name, generator.integers(-9000, 9000, shape))
    (folder / "notes.txt").write_text("no sound", "utf-8")
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Whisper of one second, with its feature extractor and a tokenizer that starts with its start token."""
    folder = tmp_path_factory.mktemp("models") / "whisper"
    tokenizer = make_tokenizer()
    config = tiny_config("whisper")
    config.vocab_size, config.decoder_start_token_id = len(tokenizer), tokenizer.bos_token_id
    torch.manual_seed(0)
    AutoModel.from_config(config, dtype=torch.float32).save_pretrained(folder)
    WhisperFeatureExtractor(chunk_length=1).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def scan_masses(run: Any, stream: str) -> np.ndarray:
    return run.heads[run.heads["stream"] == stream]["bos_mass"].to_numpy()


@pytest.mark.slow
def test_the_decoder_reads_the_prompt(whisper: Path, recordings: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(whisper, "--audio", recordings, "--prompt", "The ferry bell rang twice.", seq_len=False)
    assert outcome.code == 0, outcome.stderr
    assert not outcome.warnings
    manifest = outcome.json("manifest")
    said = "the text of --prompt after decoder_start_token_id 0, without a special token at its end"
    assert manifest["decoder_input"] == said
    run = sinkscope.load_run(outcome.folder)
    assert list(outcome.json("summary")["streams"]) == ["encoder", "decoder", "cross"]
    tokenizer = make_tokenizer()
    ids = tokenizer("The ferry bell rang twice.")["input_ids"]
    assert ids[0] == 0
    extractor = WhisperFeatureExtractor(chunk_length=1)
    sounds = [read_wav(recordings / name, RATE) for name in ("a.WAV", "b.wav")]
    features = torch.tensor(np.stack([extractor(sound, sampling_rate=RATE)["input_features"][0] for sound in sounds]))
    model = AutoModel.from_pretrained(whisper, attn_implementation="eager").eval()
    with torch.no_grad():
        outputs = model(input_features=features, decoder_input_ids=torch.tensor([ids] * 2), output_attentions=True)
    for stream in ("encoder", "decoder", "cross"):
        maps = outputs[f"{stream}_attentions"]
        expected = [torch.stack([columns(one.double())["bos_mass"] for one in each]).mean(0) for each in maps]
        assert np.allclose(scan_masses(run, stream), torch.cat(expected), atol=1e-5), stream
    other = scan_cli(whisper, "--audio", recordings, "--prompt", "The ferry bell rang once.", seq_len=False, name="o")
    assert other.json("manifest")["data"][0]["fingerprint"] != manifest["data"][0]["fingerprint"]


def test_a_prompt_needs_a_tokenizer(whisper: Path, recordings: Path, tmp_path: Path, refused: Refused) -> None:
    folder = shutil.copytree(whisper, tmp_path / "mute", ignore=shutil.ignore_patterns("tokenizer*", "special*"))
    told = refused(folder, "--audio", recordings, "--prompt", "What?", seq_len=False)
    assert told.startswith("--prompt: no usable tokenizer (")


@pytest.mark.slow
def test_a_folder_of_sound_is_no_text_with_sound(tmp_path: Path, recordings: Path, refused: Refused) -> None:
    AutoModel.from_config(tiny_config("qwen2_audio"), dtype=torch.float32).save_pretrained(tmp_path / "model")
    told = refused(tmp_path / "model", "--audio", recordings, seq_len=False)
    assert told == "--audio: this model reads sound with text; give its processor's tensors in Python"


@pytest.mark.slow
def test_a_start_token_alone_is_one_query_and_named(whisper: Path, recordings: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(whisper, "--audio", recordings, seq_len=False)
    assert outcome.code == 0, outcome.stderr
    assert list(outcome.json("summary")["streams"]) == ["encoder"]
    assert outcome.json("manifest")["decoder_input"] == "decoder_start_token_id 0 alone"
    assert ["start token alone" in warning for warning in outcome.warnings] == [True]


@pytest.mark.slow
def test_a_multilingual_whisper_is_told_its_language_and_task(
    whisper: Path, recordings: Path, scan_cli: Scan, tmp_path: Path
) -> None:
    folder = tmp_path / "multilingual"
    shutil.copytree(whisper, folder)
    tokens = {"lang_to_id": {"<|en|>": 11, "<|de|>": 12}, "task_to_id": {"transcribe": 14, "translate": 13}}
    (folder / "generation_config.json").write_text(json.dumps(tokens), "utf-8")
    outcome = scan_cli(folder, "--audio", recordings, seq_len=False)
    assert outcome.code == 0, outcome.stderr
    words = outcome.json("manifest")["decoder_input"]
    assert "after decoder_start_token_id 0, <|en|>, <|transcribe|>" in words
    given = outcome.json("summary")["streams"]["decoder"]["tokens_per_sequence"]
    assert given == 3
    run = sinkscope.load_run(outcome.folder)
    model = AutoModel.from_pretrained(whisper, attn_implementation="eager").eval()
    extractor = WhisperFeatureExtractor(chunk_length=1)
    sounds = [read_wav(recordings / name, RATE) for name in ("a.WAV", "b.wav")]
    features = torch.tensor(np.stack([extractor(sound, sampling_rate=RATE)["input_features"][0] for sound in sounds]))
    with torch.no_grad():
        outputs = model(
            input_features=features, decoder_input_ids=torch.tensor([[0, 11, 14]] * 2), output_attentions=True
        )
    expected = [
        torch.stack([columns(one.double())["bos_mass"] for one in each]).mean(0) for each in outputs.decoder_attentions
    ]
    assert np.allclose(scan_masses(run, "decoder"), torch.cat(expected), atol=1e-5)
    (folder / "generation_config.json").write_text(json.dumps(tokens | {"language": "german", "task": "translate"}))
    assert language_and_task({"pretrained_model_name_or_path": folder}) == {"<|de|>": 12, "<|translate|>": 13}


@pytest.mark.slow
def test_an_encoder_reads_recordings_cut_to_the_shortest(
    tmp_path: Path, recordings: Path, scan_cli: Scan, refused: Refused
) -> None:
    folder = tmp_path / "wav2vec2"
    model = tiny_model(AutoModel, "wav2vec2")
    model.save_pretrained(folder)
    extractor = Wav2Vec2FeatureExtractor()
    extractor.save_pretrained(folder)
    outcome = scan_cli(folder, "--audio", recordings, "--num-sequences", 3, seq_len=False)
    assert outcome.code == 0, outcome.stderr
    sounds = [read_wav(recordings / name, RATE)[:6400] for name in ("a.WAV", "b.wav", "c.wav")]
    values = extractor(sounds, sampling_rate=RATE, return_tensors="pt")["input_values"]
    expected = sinkscope.scan(model, data={"input_values": values})
    found = sinkscope.load_run(outcome.folder)
    assert np.allclose(found.heads["bos_mass"], expected.heads["bos_mass"], atol=1e-6)
    assert found.manifest.data[0].fingerprint == expected.manifest.data[0].fingerprint
    assert set(found.heads["stream"]) == {"audio"}
    assert found.layers["inf_norm"].notna().all()
    assert "reads sound alone" in refused(folder, "--audio", recordings, "--prompt", "What?", seq_len=False, name="b")


@pytest.mark.slow
def test_a_batch_gives_what_each_recording_gives() -> None:
    model = tiny_model(AutoModel, "whisper")
    given = speech_inputs("whisper", model.config)
    both = sinkscope.scan(model, data=given, batch_size=2).sequences
    one_by_one = sinkscope.scan(model, data=given, batch_size=1).sequences
    for name in ("bos_mass", "entropy", "honor", "qk_cos_other", "residual_write"):
        ours, theirs = (
            table.sort_values(["module", "sequence", "head"])[name].to_numpy(float) for table in (both, one_by_one)
        )
        assert np.allclose(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True), name
        assert np.isfinite(ours).any()


@pytest.mark.parametrize(("width", "channels"), [(1, 1), (2, 2), (3, 1), (4, 1)])
def test_samples_of_every_width(tmp_path: Path, width: int, channels: int) -> None:
    """Full scale is 1 in 8, 16, 24 and 32 bits; channels are averaged."""
    shares = np.array([[0.5], [-0.25], [0.0], [-1.0]])
    full = 2 ** (8 * width - 1)
    numbers = np.repeat((shares * full).astype(np.int64), channels, axis=1)
    numbers[:, -1] //= channels
    if width == 1:
        data = (numbers + 128).astype(np.uint8).tobytes()
    else:
        data = b"".join(int(number).to_bytes(width, "little", signed=True) for number in numbers.ravel())
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(width)
        file.setframerate(RATE)
        file.writeframes(data)
    expected = (numbers / full).mean(1)
    assert np.array_equal(read_wav(tmp_path / "a.wav", RATE), expected.astype(np.float32))


def test_what_the_decoder_reads() -> None:
    """The start token once, whether the tokenizer writes it or not; behind it all but a special token at the end."""
    tokenizer = make_tokenizer()
    plain = tokenizer("A bell.")["input_ids"]
    ended = tokenizer("A bell.</s>")["input_ids"]
    assert (plain[0], ended[-1]) == (0, tokenizer.eos_token_id)
    for text in ("A bell.", "A bell.</s>"):  # the last word was lost where the tokenizer adds no token behind it
        assert decoder_ids(tokenizer, text, 0) == plain
        assert decoder_ids(tokenizer, text, 7) == [7, *plain]
    assert decoder_ids(tokenizer, "A bell.", None) == plain
    assert decoder_ids(None, None, 7) == [7]


def test_folders_that_cannot_be_read(
    whisper: Path, tiny_folder: Path, recordings: Path, tmp_path: Path, refused: Refused
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no .wav" in refused(whisper, "--audio", empty, seq_len=False)
    assert "no such folder" in refused(whisper, "--audio", tmp_path / "none", seq_len=False)
    assert "takes no sound" in refused(tiny_folder, "--audio", recordings, seq_len=False)
    assert "not both" in refused(whisper, "--audio", recordings, "--data", "prose", seq_len=False)
    assert "not both" in refused(whisper, "--audio", recordings, "--images", recordings, seq_len=False)
    assert "--audio FOLDER" in refused(whisper, seq_len=False)
    assert "--seq-len" in refused(whisper, "--audio", recordings, "--seq-len", 8)
    write_wav(recordings / "aa.wav", np.zeros(6400), 44100)
    assert "44100 samples a second, the model reads 16000" in refused(whisper, "--audio", recordings, seq_len=False)
    (recordings / "aa.wav").write_bytes(b"no sound")
    assert "aa.wav is damaged" in refused(whisper, "--audio", recordings, seq_len=False)
    (recordings / "aa.wav").unlink()
    write_wav(recordings / "aa.wav", np.zeros(0))
    assert "holds no sound" in refused(whisper, "--audio", recordings, seq_len=False)


@pytest.mark.parametrize(
    ("family", "data", "words"),
    [
        ("whisper", torch.zeros(1, 9, dtype=torch.long), "reads input_features"),
        ("whisper", {"input_features": torch.zeros(1, 80)}, r"shape \[recording"),
        ("whisper", {"input_features": torch.zeros(1, 80, 60)}, "length 100"),
        ("whisper", {"input_values": torch.zeros(1, 80)}, "reads input_features, not input_values"),
        ("wav2vec2", {"input_values": torch.full((1, 6400), torch.nan)}, "NaN"),
        ("wav2vec2", {"input_values": torch.zeros(1, 6400), "attention_mask": [[1, 0]]}, "marks padding"),
        ("wav2vec2", {"input_values": torch.zeros(1, 6400), "padding_mask": [[1, 0]]}, "padding_mask marks padding"),
        ("vit", {"pixel_values": torch.zeros(1, 3, 32, 32), "pixel_mask": [[1, 0]]}, "pixel_mask marks padding"),
        ("wav2vec2", {"input_values": torch.zeros(1, 6400), "decoder_input_ids": [[1, 2]]}, "no decoder"),
        ("wav2vec2", {"pixel_values": torch.zeros(1, 3, 32, 32)}, "takes no pictures"),
        ("bert", {"input_values": torch.zeros(1, 6400)}, "takes no sound"),
        ("wav2vec2", {"input_values": torch.zeros(1, 5)}, "kernel of one of its convolutions: give longer recordings"),
    ],
)
def test_the_wrong_kind_of_input_is_refused(family: str, data: Any, words: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(tiny_model(AutoModel, family), data=data)


@pytest.mark.parametrize("rows", [[[1, 2, 3]], [[1, 2, 3], [1, 2]], [[1, 2, 3], [1, 2, 999]]])
def test_decoder_texts_that_fit_no_recording_are_refused(rows: list[list[int]]) -> None:
    model = tiny_model(AutoModel, "whisper")
    given = speech_inputs("whisper", model.config) | {"decoder_input_ids": rows}
    with pytest.raises(sinkscope.SinkscopeError, match=r"one for each signal|vocabulary"):
        sinkscope.scan(model, data=given)


def test_frames_that_fill_a_window_up_are_not_read() -> None:
    """Granite's blocks of 128 frames: 160 frames are two, then, halved, one filled up; 256 are two, then one whole."""
    model = tiny_model(transformers.AutoModel, "granite_speech5_ctc")
    long = torch.randn(1, 256, 320, generator=torch.Generator().manual_seed(0))
    run = sinkscope.scan(model, data={"input_features": long})
    assert [site.module for site in run.manifest.attention] == ["encoder.layers.1.self_attn"]
    assert run.summary.warnings == [
        "attention that is no map of queries and keys was not read: encoder.layers.0.self_attn"
    ]
    with pytest.raises(sinkscope.SinkscopeError, match="no attention of GraniteSpeech5ForCTC"):
        sinkscope.scan(model, data={"input_features": long[:, :160]})


@pytest.mark.parametrize("measure", ["smoothing", "spikes"])
@pytest.mark.parametrize("family", ["whisper", "wav2vec2"])
def test_what_a_layer_is_made_of_is_not_looked_for_without_token_ids(family: str, measure: str) -> None:
    model = tiny_model(AutoModel, family)
    words = f"^--measure {measure}: the parts of a layer are found in a pass over token ids, but .* reads input_"
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(model, data=speech_inputs(family, model.config), measure=measure)
