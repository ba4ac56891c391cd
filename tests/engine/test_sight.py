"""Vision-language models with tiny random configurations, and pictures from a folder through a model's processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import Refused, Scan, make_tokenizer
from families import dense_maps, tiny_config, tiny_model
from maps import columns
from pictured import FIRST, IMAGE, IMAGE_TOKENS, LENGTH, inputs, see, with_image_processors
from PIL import Image
from tiers import slow_but
from torch import Tensor
from transformers import AutoModel, CLIPImageProcessor, LlavaProcessor, ViTImageProcessor
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

import sinkscope
from sinkscope.checkpoints import wrap_model
from sinkscope.cli import app
from sinkscope.inputs.signals import GRIDS


def alone(given: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    """Sequence `number` of a batch, as a batch of one."""
    size = len(given["pixel_values"]) // len(given["input_ids"])
    one = {name: value[number : number + 1] for name, value in given.items()}
    return one | {"pixel_values": given["pixel_values"][number * size : (number + 1) * size]}


def assert_masses(run: Any, module: str, number: int, probabilities: Tensor) -> None:
    rows = run.sequences[run.sequences["head"].notna() & (run.sequences["module"] == module)]
    own = rows[rows["sequence"] == number].sort_values("head")
    for name, values in columns(probabilities[0].double()).items():
        ours = torch.tensor(own[name].to_numpy(float))
        assert float((ours - values).abs().max()) < 1e-5, f"{module} sequence {number} {name}"


@pytest.mark.parametrize("family", slow_but(IMAGE_TOKENS, "qwen3_vl"))
def test_both_streams_are_the_model_s_own_maps(family: str) -> None:
    """All maps in float64 from each call's own queries and keys, and the text's from the model's eager attention."""
    model, given = see(family), inputs(family)
    run = sinkscope.scan(model, data=given)
    assert run.manifest.self_check.status == "passed"
    sites = run.manifest.attention
    assert [site.stream for site in sites] == ["vision", "vision", "text", "text"]
    base, eager = wrap_model(model).model, wrap_model(see(family, "eager")).model
    mass = np.zeros((2, 4))
    for number in range(2):
        one = alone(given, number)
        maps = dense_maps(lambda *_, one=one: base(**one, use_cache=False), one["input_ids"], one["attention_mask"])
        for site, probabilities in zip(sites, maps, strict=True):
            assert_masses(run, site.module, number, probabilities)
        with torch.no_grad():
            text = eager(**one, use_cache=False, output_attentions=True).attentions
        for site, probabilities in zip(sites[2:], text, strict=True):
            assert_masses(run, site.module, number, probabilities)
            seen = probabilities[0, :, :, FIRST : FIRST + IMAGE_TOKENS[family]].sum(-1).mean(-1)
            mass[site.layer] += seen.numpy() / 2
    found = run.summary.image_tokens
    assert found.count == IMAGE_TOKENS[family]
    assert found.positions == (FIRST, FIRST + IMAGE_TOKENS[family] - 1)
    assert {(layer, head) for layer, head, _ in found.heads} == {(i, j) for i in range(2) for j in range(4)}
    for layer, head, value in found.heads:
        assert abs(value - mass[layer, head]) < 1e-5
    positions = run.positions[(run.positions["stream"] == "text") & (run.positions["head"] == 0)]
    named = positions[positions["layer"] == 0]["token"].eq("image").fillna(False)
    assert np.flatnonzero(named).tolist() == list(range(FIRST, FIRST + IMAGE_TOKENS[family]))


def test_a_tower_is_not_checked_against_the_maps_of_a_text_of_its_length() -> None:
    """17 patches and 17 tokens: what the model returns as attention maps are the text's."""
    given = inputs("llava")
    for name in ("input_ids", "attention_mask"):
        given[name] = given[name][:, FIRST - 1 : FIRST + IMAGE_TOKENS["llava"]]
    check = sinkscope.scan(see("llava"), data=given).manifest.self_check
    assert check.tokens == 17
    assert check.status == "passed"
    assert check.reason == "the model returns 0 eager attention maps for 2 attention calls"


def test_eager_attention_of_another_kind_is_told_beside_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = see("llava"), inputs("llava")
    text, eager = model.model.language_model, modeling_llama.eager_attention_forward
    assert sinkscope.scan(model, data=given).manifest.self_check.eager_difference is None
    monkeypatch.setattr(
        modeling_llama, "eager_attention_forward",
        lambda module, query, *rest, **keywords: eager(module, 3 * query, *rest, **keywords),
    )  # fmt: skip
    assert type(text).__module__ == modeling_llama.__name__
    difference = sinkscope.scan(model, data=given).manifest.self_check.eager_difference
    assert difference is not None
    assert difference > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(IMAGE_TOKENS, "qwen2_5_vl"))
def test_padding_beside_pictures_counts_nowhere(family: str) -> None:
    given = inputs(family)
    padded = dict(given)
    for name in ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in given:
            padded[name] = torch.nn.functional.pad(given[name], (6, 0))
    run, plain = (sinkscope.scan(see(family), data=data, self_check=False) for data in (padded, given))
    for name in ("bos_mass", "entropy", "honor", "qk_cos_other"):
        assert np.array_equal(run.heads[name], plain.heads[name], equal_nan=True), name


@pytest.mark.slow
def test_a_picture_s_windows_are_named_as_not_read() -> None:
    """Qwen2.5-VL's first vision layer attends within windows; a picture of one window has none to tell."""
    run = sinkscope.scan(see("qwen2_5_vl"), data=inputs("qwen2_5_vl", grid=8))
    assert [site.stream for site in run.manifest.attention] == ["vision", "text", "text"]
    assert run.summary.warnings == ["attention that is no map of queries and keys was not read: visual.blocks.0.attn"]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_of_several_pictures_the_text_is_read(family: str) -> None:
    """Two pictures in each sequence: rows of their own in the vision tower, which is named as not read."""
    model, given = see(family), inputs(family, sequences=4)
    count = IMAGE_TOKENS[family]
    given = {name: value for name, value in given.items() if name in ("pixel_values", "image_grid_thw")}
    ids = torch.randint(10, 99, (2, 2 * LENGTH), generator=torch.Generator().manual_seed(1))
    ids[:, FIRST : FIRST + count] = IMAGE
    ids[:, FIRST + count + 1 : FIRST + 2 * count + 1] = IMAGE
    given |= {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "qwen3_vl":
        given["mm_token_type_ids"] = (ids == IMAGE).int()
    run = sinkscope.scan(model, data=given)
    assert [site.stream for site in run.manifest.attention] == ["text", "text"]
    assert "was not read" in run.summary.warnings[0]
    assert run.summary.image_tokens.count == 2 * count
    eager = wrap_model(see(family, "eager")).model
    for number in range(2):
        one = alone(given, number) | {name: given[name][2 * number : 2 * number + 2] for name in GRIDS if name in given}
        with torch.no_grad():
            maps = eager(**one, use_cache=False, output_attentions=True).attentions
        for site, probabilities in zip(run.manifest.attention, maps, strict=True):
            assert_masses(run, site.module, number, probabilities)
    ids[1, FIRST] = 20
    with pytest.raises(sinkscope.SinkscopeError, match="equally many pictures and image tokens"):
        sinkscope.scan(model, data=given)


@pytest.mark.slow
def test_sound_in_text_is_read_like_pictures() -> None:
    """Qwen2-Audio: 25 tokens stand for 100 frames; its streams are the sound's and the text's."""
    torch.manual_seed(0)
    config = tiny_config("qwen2_audio")
    config.audio_token_id = config.audio_token_index = IMAGE
    names = ("sdpa", "eager")
    models = [AutoModel.from_config(config, dtype=torch.float32, attn_implementation=name).eval() for name in names]
    models[1].load_state_dict(models[0].state_dict())
    ids = torch.randint(10, 99, (2, 40), generator=torch.Generator().manual_seed(0))
    ids[:, FIRST : FIRST + 25] = IMAGE
    frames = 2 * config.audio_config.max_source_positions
    given = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "input_features": torch.randn(2, config.audio_config.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(2, frames, dtype=torch.long),
    }
    run = sinkscope.scan(models[0], data=given)
    assert [site.stream for site in run.manifest.attention] == ["audio", "audio", "text", "text"]
    assert run.manifest.self_check.status == "passed"
    for number in range(2):
        one = {name: value[number : number + 1] for name, value in given.items()}
        with torch.no_grad():
            maps = models[1](**one, use_cache=False, output_attentions=True).attentions
        for site, probabilities in zip(run.manifest.attention[-2:], maps, strict=True):
            assert_masses(run, site.module, number, probabilities)


@pytest.mark.slow
def test_image_tokens_in_other_places_give_no_mass() -> None:
    given = inputs("llava")
    given["input_ids"][1] = given["input_ids"][1].roll(2)
    assert sinkscope.scan(see("llava"), data=given).summary.image_tokens is None


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("llava", {"pixel_values": torch.zeros(3, 3, 32, 32)}, "one picture for each sequence"),
        ("llava", {"pixel_values": torch.full((2, 3, 32, 32), torch.nan)}, "finite"),
        ("llava", {"pixel_values": "here"}, "tensors are needed"),
        ("qwen3_vl", {"image_grid_thw": torch.tensor([[1, 4, 4]])}, "one picture for each sequence"),
    ],
)
def test_pictures_that_belong_to_no_sequence_are_refused(family: str, change: dict[str, Any], words: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(see(family), data=inputs(family) | change)


@pytest.mark.slow
def test_smoothing_beside_pictures_is_the_text_s() -> None:
    """W_V is looked for in a pass without pictures: the vision stream's columns stay empty."""
    run = sinkscope.scan(see("llava"), data=inputs("llava"), smoothing=True)
    assert run.smoothing is not None
    assert run.smoothing[run.smoothing["stream"] == "text"]["beta"].notna().all()
    assert run.smoothing[run.smoothing["stream"] == "vision"]["beta"].isna().all()


# A folder of pictures


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three pictures of different sizes, and a file that is none."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    generator = np.random.default_rng(0)
    for name, size in (("b.png", (40, 50)), ("a.jpg", (64, 32)), ("c.PNG", (32, 32))):
        Image.fromarray(generator.integers(0, 255, (*size, 3), dtype=np.uint8)).save(folder / name)
    (folder / "notes.txt").write_text("no picture", "utf-8")
    return folder


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LLaVA with its processor on disk."""
    folder = tmp_path_factory.mktemp("models") / "llava"
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image = tokenizer.convert_tokens_to_ids("<image>")
    see("llava", image=image, vocabulary=len(tokenizer)).save_pretrained(folder)
    processor = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    LlavaProcessor(
        processor, tokenizer, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
    ).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_a_folder_of_pictures_with_a_prompt(llava: Path, pictures: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(llava, "--images", pictures, "--prompt", "What is this?", "--num-sequences", 3, seq_len=False)
    assert outcome.code == 0, outcome.stderr
    summary, manifest = outcome.json("summary"), outcome.json("manifest")
    assert list(summary["streams"]) == ["vision", "text"]
    assert summary["sequences"] == 3
    assert summary["image_tokens"]["count"] == 16
    assert manifest["data"][0]["documents"][:2] == ["a.jpg", "b.png"]
    other = scan_cli(llava, "--images", pictures, "--num-sequences", 3, seq_len=False, name="other")
    assert other.json("manifest")["data"][0]["fingerprint"] != manifest["data"][0]["fingerprint"]
    assert other.json("manifest")["data"][0]["seq_len"] != manifest["data"][0]["seq_len"]


@pytest.mark.slow
@with_image_processors
def test_a_vision_model_reads_the_folder_alone(
    tmp_path: Path, pictures: Path, scan_cli: Scan, refused: Refused
) -> None:
    folder = tmp_path / "vit"
    model = tiny_model(transformers.AutoModel, "vit")
    model.save_pretrained(folder)
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    processor.save_pretrained(folder)
    outcome = scan_cli(folder, "--images", pictures, "--num-sequences", 2, seq_len=False)
    assert outcome.code == 0, outcome.stderr
    with Image.open(pictures / "a.jpg") as first, Image.open(pictures / "b.png") as second:
        pixels = processor(images=[first.convert("RGB"), second], return_tensors="pt")["pixel_values"]
    expected = sinkscope.scan(model, data={"pixel_values": pixels})
    found = sinkscope.load_run(outcome.folder)
    assert np.allclose(found.heads["bos_mass"], expected.heads["bos_mass"], atol=1e-6)
    assert found.manifest.data[0].fingerprint == expected.manifest.data[0].fingerprint
    assert found.manifest.data[0].documents == ["a.jpg", "b.png"]
    assert expected.manifest.data[0].documents == ["picture 0", "picture 1"]
    assert "reads pictures alone" in refused(folder, "--images", pictures, "--prompt", "What?", seq_len=False, name="b")


def test_fewer_pictures_than_asked_for_are_counted() -> None:
    model, pixels = tiny_model(transformers.AutoModel, "vit"), torch.rand(2, 3, 32, 32)
    asked = {number: sinkscope.scan(model, data={"pixel_values": pixels}, num_sequences=number) for number in (1, 2, 5)}
    assert [run.summary.warnings for run in asked.values()] == [
        [], [], ["pixel_values: 2 sequences where 5 were asked for: the data hold no more"],
    ]  # fmt: skip


def test_folders_that_cannot_be_read(
    llava: Path, tiny_folder: Path, pictures: Path, tmp_path: Path, refused: Refused
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no .png or .jpg" in refused(llava, "--images", empty, seq_len=False)
    assert "no such folder" in refused(llava, "--images", tmp_path / "none", seq_len=False)
    assert "takes no pictures" in refused(tiny_folder, "--images", pictures, seq_len=False)
    assert "not both" in refused(llava, "--images", pictures, "--data", "prose", seq_len=False)
    assert "--prompt" in refused(llava, "--prompt", "What?", seq_len=False)
    (pictures / "aa.png").write_bytes(b"no picture")
    assert "aa.png is damaged" in refused(llava, "--images", pictures, "--num-sequences", 3, seq_len=False)


def test_without_pillow_one_line_says_so(
    llava: Path, pictures: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install pillow" in refused(llava, "--images", pictures, seq_len=False)


@pytest.mark.slow
def test_compare_reads_the_pictures_of_the_run(llava: Path, pictures: Path, scan_cli: Scan) -> None:
    """A run of a folder of pictures knows the folder and the prompt: a model in a run's place reads them again."""
    outcome = scan_cli(llava, "--images", pictures, "--prompt", "Where?", "--num-sequences", 2, seq_len=False)
    result = CliRunner().invoke(app, ["compare", str(outcome.folder), str(llava)])
    assert result.exit_code == 0, result.output
    assert "paired: the same token sequences in both" in result.output
