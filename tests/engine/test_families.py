"""Every family transformers knows: scanned from a tiny random configuration, compared with its own eager attention.

Each model reads a batch of two sequences of unequal length, padded on the right. A family that cannot be read stands in
a table with the reason, and its error must say so.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import COUNTED
from families import (
    FAST_CAUSAL,
    LENGTH,
    VOCABULARY,
    dense_maps,
    eager_maps,
    eager_outputs,
    speech_inputs,
    tiny_model,
    unaveraged,
)
from huggingface_hub.errors import StrictDataclassClassValidationError
from maps import compare_maps
from pictured import IMAGE_TOKENS
from tiers import slow_but, thinned
from torch import Tensor
from transformers import CONFIG_MAPPING
from transformers.models.auto import modeling_auto

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward

OLDER = tuple(map(int, transformers.__version__.split(".")[:2])) < (5, 24)
SHORT = 20
NO_SOFTMAX = "no attention of .* could be read"
PICTURES = "reads pixel_values, not token ids"
MASKED = list(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
SEQ2SEQ = list(modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
CAUSAL = list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
BESIDE = [family for family in modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if family not in CAUSAL]
VISION = ["beit", "clip_vision_model", "data2vec-vision", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit"]
VISION += ["idefics3_vision", "ijepa", "internvl_vision", "radio", "siglip_vision_model", "vit", "vit_msn", "yolos"]
TEXT = ["clip_text_model", "dpr", "embedding_gemma2_text", "imagegpt", "markuplm", "openai_privacy_filter", "splinter"]
TEXT = [family for family in TEXT if family in CONFIG_MAPPING]
SPEECH = ["audio-spectrogram-transformer", "canary", "cohere_asr", "data2vec-audio", "granite_speech5_ctc", "hubert"]
SPEECH += ["lasr_ctc", "moonshine", "moonshine_streaming", "nemotron_asr_streaming"]
SPEECH += ["parakeet_ctc", "qwen2_audio_encoder", "sew", "sew-d", "speech_to_text", "speecht5", "unispeech"]
SPEECH += ["unispeech-sat", "wav2vec2", "wav2vec2-bert", "wav2vec2-conformer", "wavlm", "whisper"]
SPEECH = [family for family in SPEECH if family in CONFIG_MAPPING]
LISTS = {
    "causal language models": CAUSAL,
    "masked language models": MASKED,
    "encoder-decoders": SEQ2SEQ,
    "language models beside pictures or sound, over text alone": BESIDE,
    "other models of text (a choice)": TEXT,
    "vision (a choice)": VISION,
    "speech (a choice)": SPEECH,
}
"""The lists of docs/models.md whose every type a test of this file reads or refuses."""
READ, REFUSED = "read", "refused"

UNREADABLE = {
    **dict.fromkeys(("fnet", "longformer", "mra", "yoso"), NO_SOFTMAX),
    "mamba": NO_SOFTMAX,
    "mamba2": NO_SOFTMAX,
    "falcon_mamba": NO_SOFTMAX,
    "rwkv": NO_SOFTMAX,
    "xlstm": NO_SOFTMAX,
    "reformer": NO_SOFTMAX,
    "granite_speech5_ctc": NO_SOFTMAX,
    "speecht5": "cannot be run on its main input alone: .*expected input with shape",
    "voxtral_realtime": "cannot be run on its main input alone: .*input_features",
    "idefics": "cannot be run on its main input alone: .*pixel_values",
    "udop": "cannot be run on its main input alone: .*Bbox",
    "pi0": "reads state, which",
    "pix2struct": "reads flattened_patches, which",
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo"), PICTURES),
    **dict.fromkeys(("kosmos-2", "pp_formulanet", "vision-encoder-decoder"), PICTURES),
}
"""Refused, by these words. The first five have no softmax attention. Reformer takes exp(logits - logsumexp) over
chunks of hashed positions: no softmax is called, and no row is one query over all keys. FNet has Fourier transforms,
YOSO hashes, MRA approximates by blocks; Longformer's rows hold a band of keys and global ones apart."""

NONE_AT_ALL = ("fnet", "mra", "yoso", "mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
"""Those of them that have no softmax over keys at all; the others' is no map of one sequence's queries and keys."""

WINDOWED = ("swin", "swinv2", "donut-swin", "maskformer-swin", "hiera", "pvt_v2", "segformer", "glpn", "cvt")

UNBUILT: dict[str, tuple[Any, str]] = {
    "gemma3n": (ImportError, "timm"),
    "gemma4_assistant": (
        (ValueError, sinkscope.SinkscopeError),
        "layer types producing a cache|hidden_size_per_layer_input|main input alone: '(NoneType|sliding_attention)'",
    ),
    "gemma4_unified_assistant": (
        (ValueError, AttributeError, sinkscope.SinkscopeError),
        "layer types producing a cache|'vocab_size'|main input alone: 'sliding_attention' is missing",
    ),
    **dict.fromkeys(("apertus1p5", "muse_spark", "nemo_speechlm"), (StrictDataclassClassValidationError, "must")),
    "evolla": (ValueError, "Unrecognized configuration class"),
    "granite4_vision": ((TypeError, AttributeError), "NoneType|'attention_multiplier'"),
    "kyutai_speech_to_text": (AssertionError, "Padding_idx"),
    "mistral4": (sinkscope.SinkscopeError, "main input alone: The size of tensor a"),
    "perception_lm": (ImportError, "timm"),
    "fast_vlm": (ImportError, "timm"),
    "qwen3_omni_moe": (AttributeError, "shared_expert_intermediate_size"),
    "unlimited_ocr": (RuntimeError, "The size of tensor a"),
}
"""No tiny configuration builds these. nemo_speechlm checks the sizes of four nested parts against one another.
transformers itself does not build gemma3n where the package timm is missing, nor the assistants: its own checks (in
5.17 and from 5.24 on the first forward pass) forbid what they need (all layers take keys and values from another model:
text alone could not run them)."""


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Models this small lose time to threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def batch(second: int) -> tuple[Tensor, Tensor]:
    """Sequences of 32 and `second` tokens, padded on the right, and their mask."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    ids[1, second:], mask[1, second:] = 0, 0
    return ids, mask


EQUAL = ("cpmant", "blt", "diffusion_gemma", "funnel", "perceiver", "prophetnet", "t5gemma2")
"""Read with sequences of equal length. CPM-Ant takes padding to stand on the left. BLT attends from patches, Funnel
from pooled tokens, Perceiver from latents, DiffusionGemma from what it writes, ProphetNet's decoder from several
streams at once, T5Gemma 2's to its own and the encoder's positions in one: a mask of tokens does not cut these, and a
padded batch is refused."""

UNREAD_CALL = {"diffusion_gemma": 2}
"""The attention call that is named as not read: a window of the text before the canvas, and the canvas."""

SAME_OUTPUT = 1e-4
"""Eager attention whose output is farther from the model's own is another function, and no reference."""


def distance(output: Tensor, plain: Tensor, lengths: list[int]) -> float:
    """Largest relative distance over the sequences' valid positions."""
    pairs = [(output[number, :length], plain[number, :length]) for number, length in enumerate(lengths)]
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def check(auto: Any, family: str) -> Any:
    """Scans a tiny model of that type and compares; returns the run.

    The output while watched: within 1e-6 of the plain one, or twice what the model's own eager attention differs by.
    """
    model = tiny_model(auto, family)
    ids, mask = batch(LENGTH if family in EQUAL else SHORT)
    run = sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, batch_size=2, epsilon=0.1)
    assert run.manifest.self_check.status == "passed"
    base = wrap_model(model).model
    forward = Forward(base)
    found = plan(base, lambda: forward(ids[:1, :16]))
    assert found.keywords == {}
    with torch.no_grad():
        plain = forward(ids, mask)[0]
        lengths = mask.sum(1).tolist()
        spans = None if family in EQUAL else [(0, length) for length in lengths]
        with Capture(base, found, lambda view, row: None, 0.3).watching(spans, LENGTH):
            watched = forward(ids, mask)[0]
    outputs = eager_outputs(tiny_model(auto, family, "eager"), ids, mask)
    own = float("nan") if outputs is None else distance(outputs[0], plain, lengths)
    assert distance(watched, plain, lengths) < max(1e-6, 2 * own)
    streams = [site.stream for site in run.manifest.attention]
    assert not run.heads.duplicated(["stream", "layer", "head"]).any()
    maps = eager_maps(outputs, family, streams) if own < SAME_OUTPUT else None
    if maps is None:
        maps = [found for call, found in enumerate(dense_maps(forward, ids, mask)) if call != UNREAD_CALL.get(family)]
    compare_maps(run, maps, lengths)
    return run


Record = Callable[[str, object], None]


@pytest.mark.parametrize("family", slow_but(CAUSAL, *FAST_CAUSAL))
def test_causal_language_models(family: str, record_property: Record) -> None:
    record_property(COUNTED, ("causal language models", expect(transformers.AutoModelForCausalLM, family)))


@pytest.mark.parametrize("family", slow_but(MASKED, "bert", "deberta-v2", "fnet"))
def test_masked_language_models(family: str, record_property: Record) -> None:
    record_property(COUNTED, ("masked language models", expect(transformers.AutoModelForMaskedLM, family)))


@pytest.mark.parametrize("family", slow_but(SEQ2SEQ, "t5"))
def test_encoder_decoders(family: str, record_property: Record) -> None:
    record_property(COUNTED, ("encoder-decoders", expect(transformers.AutoModelForSeq2SeqLM, family)))


@pytest.mark.parametrize("family", slow_but(thinned(BESIDE)))
def test_language_models_beside_pictures_or_sound(family: str, record_property: Record) -> None:
    """The text alone, as most are scanned; tests/engine/test_sight.py gives some of them pictures, too."""
    record_property(COUNTED, ("beside pictures or sound", expect(transformers.AutoModelForMultimodalLM, family)))


@pytest.mark.parametrize("family", slow_but(TEXT, "splinter"))
def test_other_models_of_text(family: str, record_property: Record) -> None:
    """Splinter has no sdpa, does not say that it is not causal, and where nothing is padded it has no mask."""
    record_property(COUNTED, ("other models of text (a choice)", expect(transformers.AutoModel, family)))


@pytest.mark.parametrize("family", slow_but(VISION, "vit"))
def test_vision_models(family: str, record_property: Record) -> None:
    """Pictures of 32 x 32 pixels; both of equal size, so nothing is padded."""
    model = tiny_model(transformers.AutoModel, family)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    run = sinkscope.scan(model, data={"pixel_values": pixels}, epsilon=0.1)
    assert run.manifest.self_check.status == "passed"
    outputs = eager_outputs(tiny_model(transformers.AutoModel, family, "eager"), pixels, None)
    maps = eager_maps(outputs, family, [site.stream for site in run.manifest.attention])
    assert maps is not None
    compare_maps(run, maps, [maps[0].shape[-1]] * 2)
    assert set(run.heads["stream"]) == {"vision"}
    record_property(COUNTED, ("vision (a choice)", READ))


@pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's, of Lasr's convolutions
@pytest.mark.parametrize("family", slow_but(SPEECH, "whisper"))
def test_speech_models(family: str, record_property: Record) -> None:
    """Recordings of one length; the decoder, where there is one, reads a text of its own."""
    record_property(COUNTED, ("speech (a choice)", expect(transformers.AutoModel, family, check_speech)))


RECURRENT = ("nemotron_asr_streaming",)
"""Their decoders have no attention."""


def check_speech(auto: Any, family: str) -> Any:
    """Scans two recordings and compares all maps with the model's own eager ones (torch's own, where it averages).

    Returns the run."""
    model = tiny_model(auto, family)
    given = speech_inputs(family, model.config)
    run = sinkscope.scan(model, data=given, batch_size=2, epsilon=0.1)
    assert run.manifest.self_check.status == "passed"
    base = wrap_model(model).model
    forward = Forward(base)
    extra = {name: value for name, value in given.items() if name != forward.signal}
    sound = given[forward.signal]
    found = plan(base, lambda: forward(sound[:1], **{name: value[:1] for name, value in extra.items()}))
    assert found.keywords == {}
    with torch.no_grad():
        plain = forward(sound, **extra)[0]
        with Capture(base, found, lambda view, row: None, 0.3).watching():
            watched = forward(sound, **extra)[0]
    assert distance(watched, plain, [plain.shape[1]] * 2) < 1e-6
    with unaveraged() as maps:
        outputs = eager_outputs(tiny_model(auto, family, "eager"), sound, None, **extra)
    same = outputs is not None and distance(outputs[0], plain, [plain.shape[1]] * 2) < SAME_OUTPUT
    streams = [site.stream for site in run.manifest.attention]
    read = {"encoder"} if family in RECURRENT else {"encoder", "decoder", "cross"}
    assert set(streams) == (read if extra else {"audio"})
    own = maps[-len(streams) :] if maps else eager_maps(outputs, family, streams) if same else None
    compare_maps(run, dense_maps(forward, sound, None, **extra) if own is None else own, [LENGTH] * 2)
    return run


@pytest.mark.parametrize("family", slow_but(WINDOWED, "swin", "segformer"))
def test_attention_within_windows_or_to_pooled_keys_is_refused(family: str) -> None:
    """Swin's and Hiera's rows are windows of a picture, the others' keys are pooled: no row is a patch over patches."""
    model = tiny_model(transformers.AutoModel, family)
    size = model.config.image_size if family == "hiera" else (32, 32)
    pixels = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with pytest.raises(sinkscope.SinkscopeError, match=f"no attention of {type(model).__name__} could be read"):
        sinkscope.scan(model, data={"pixel_values": pixels})


@pytest.mark.slow
def test_a_stage_whose_keys_are_all_patches_is_read() -> None:
    """PVT pools the keys of all stages but its last; those are named."""
    model = tiny_model(transformers.AutoModel, "pvt")
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    run = sinkscope.scan(model, data={"pixel_values": pixels})
    assert [site.module[:16] for site in run.manifest.attention] == ["encoder.block.3."] * 2
    assert "was not read: encoder.block.0.0.attention.self" in run.summary.warnings[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "read"),
    [
        ("oneformer", "pixel_values and task_inputs"), ("sam2_video", "inference_session"),
        ("qwen2_5_vl_vision", "hidden_states"),
    ],
)  # fmt: skip
def test_an_input_that_nobody_can_give_is_named(family: str, read: str) -> None:
    if OLDER and family != "oneformer":
        pytest.skip("before transformers 5.24, its configuration or automatic class may not build it")
    with pytest.raises(sinkscope.SinkscopeError, match=f"reads {read}, which sinkscope cannot give it"):
        sinkscope.scan(tiny_model(transformers.AutoModel, family), data=torch.zeros(1, 9, dtype=torch.long))


@pytest.mark.parametrize(
    ("family", "data", "words"),
    [
        ("vit", torch.zeros(1, 9, dtype=torch.long), "reads pixel_values"),
        ("vit", {"pixel_values": torch.zeros(3, 32, 32)}, r"shape \[picture, channel"),
        ("vit", {"pixel_values": torch.full((1, 3, 32, 32), torch.nan)}, "NaN"),
        ("bert", {"pixel_values": torch.zeros(1, 3, 32, 32)}, "reads token ids"),
    ],
)
def test_the_wrong_kind_of_input_is_refused(family: str, data: Any, words: str) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=words):
        sinkscope.scan(tiny_model(transformers.AutoModel, family), data=data)


NAMED = {
    "diffusion_gemma": ["layers.0.self_attn"],
    "led": [f"encoder.layers.{layer}.self_attn.longformer_self_attn" for layer in range(2)],
    "longt5": [f"encoder.block.{layer}.layer.0.LocalSelfAttention" for layer in range(2)],
    "pegasus_x": [f"encoder.layers.{layer}.self_attn" for layer in range(2)],
    "prophetnet": [f"layers.{layer}.self_attn" for layer in range(2)],
}
"""Named in a warning as not read: they attend in bands and blocks, DiffusionGemma's to a window of the text and to what
is written. Of ProphetNet's (the decoder's, with or without an
encoder) the main stream is read, and the streams that predict are not."""


WITHOUT_BLOCKS = ("flaubert", "xlm")
"""Families whose attention modules stand in a list of their own."""

UNPROJECTED = ("convbert", "deepseek_v4", "jetmoe", "squeezebert", "xlnet")
"""Families of which no linear layer reads the heads side by side: ConvBERT's reads a convolution beside them,
DeepSeek-V4's reads groups of them, JetMoE has experts, SqueezeBERT convolves, and XLNet's matrix has no layer."""


OTHERWISE = ("nemotron_asr_streaming", "paligemma")
"""Families whose eager attention is another than their sdpa's: PaliGemma's sdpa attends to all keys of a text."""

ONCE_OTHERWISE = ("moshi",)
"""The same before transformers 5.24: in 5.17, Moshi's eager attention sees later tokens where no mask is given."""


def expect(auto: Any, family: str, check: Callable[[Any, str], Any] = check) -> str:
    """Reads the family, or fails to build or to read it in the words of the tables; says which (see `fate`)."""
    if family in UNBUILT:
        error, words = UNBUILT[family]
        with pytest.raises(error, match=words):
            check(auto, family)
    elif family in UNREADABLE:
        with pytest.raises(sinkscope.SinkscopeError, match=UNREADABLE[family]):
            check(auto, family)
    else:
        warnings = check(auto, family).summary.warnings
        unprojected = [warning for warning in warnings if "columns that need W_O are empty there" in warning]
        assert bool(unprojected) == (family in UNPROJECTED)
        without_blocks = [warning for warning in warnings if "columns that need the stream are empty there" in warning]
        assert bool(without_blocks) == (family in WITHOUT_BLOCKS)
        otherwise = [warning for warning in warnings if "this model attends otherwise" in warning]
        assert bool(otherwise) == (family in OTHERWISE) or (OLDER and family in ONCE_OTHERWISE)
        warnings = [warning for warning in warnings if warning not in (*unprojected, *without_blocks, *otherwise)]
        beginning = "attention that is no map of queries and keys was not read: "
        named = [name for warning in warnings for name in warning.removeprefix(beginning).split(", ")]
        assert [name.removeprefix("decoder.") for name in named] == NAMED.get(family, [])
    return fate(family)


def fate(family: str) -> str:
    """What becomes of a family, by the tables that its test holds it to."""
    if family in UNBUILT:
        return "not built"
    if family in NONE_AT_ALL:
        return "no softmax attention"
    return REFUSED if family in UNREADABLE else READ


NOTES = {
    "reformer": "chunks of hashed positions",
    "gemma3n": "timm needed; gemma3n_text is read",
    "gemma4_assistant": "keys and values of another model needed",
    "gemma4_unified_assistant": "keys and values of another model needed",
    "longformer": "bands of keys, and global ones apart",
    **dict.fromkeys(("apertus1p5", "kyutai_speech_to_text", "muse_spark", "nemo_speechlm"), "no tiny configuration"),
    **dict.fromkeys(("granite4_vision", "mistral4", "qwen3_omni_moe", "unlimited_ocr"), "no tiny configuration"),
    "evolla": "no automatic class builds it",
    **dict.fromkeys(("fast_vlm", "perception_lm"), "timm needed"),
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo", "kosmos-2"), "pictures needed"),
    **dict.fromkeys(("idefics", "pp_formulanet", "vision-encoder-decoder"), "pictures needed"),
    "pi0": "a robot's state needed",
    "pix2struct": "patches of a picture needed",
    "udop": "boxes of its tokens needed",
    "voxtral_realtime": "sound needed beside text",
    "granite_speech5_ctc": "blocks of frames",
    "speecht5": "its prenets stand outside the base model",
}
"""What docs/models.md says of a type beside its fate."""


def record() -> dict[str, Any]:
    """What docs/families.json holds, of which docs/models.md is written: each list's types by their fate, and notes."""
    fates = {name: {family: fate(family) for family in families} for name, families in LISTS.items()}
    fates["vision, windows or pooled keys (a choice)"] = dict.fromkeys(WINDOWED, REFUSED)
    fates["vision-language (a choice)"] = dict.fromkeys(IMAGE_TOKENS, READ)
    lists: dict[str, dict[str, list[str]]] = {}
    for name, families in fates.items():
        for family, what in sorted(families.items()):
            lists.setdefault(name, {}).setdefault(what, []).append(family)
    return {"transformers": ".".join(transformers.__version__.split(".")[:2]), "lists": lists, "notes": NOTES}


def test_the_page_s_families_are_what_these_tests_read() -> None:
    """Each family's own test holds its fate to what happens; `python tests/support/write_families.py` writes the
    file."""
    written = json.loads((Path(__file__).parents[2] / "docs" / "families.json").read_text("utf-8"))
    if written["transformers"] != record()["transformers"]:
        pytest.skip(f"docs/families.json lists the types of transformers {written['transformers']}")
    assert written == record()


@pytest.mark.slow
def test_padding_that_an_attention_cannot_tell_is_refused() -> None:
    ids, mask = batch(SHORT)
    model = tiny_model(transformers.AutoModelForCausalLM, "blt")
    with pytest.raises(sinkscope.SinkscopeError, match="give sequences of equal length"):
        sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}, batch_size=2)
