"""Opening checkpoints: those that load, and one-line errors for each way a name, folder or weight file can be wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Refused, Scan, make_model
from ggufs import write_gguf
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FSMTConfig,
    FSMTModel,
)

from sinkscope import SinkscopeError, scan
from sinkscope.checkpoints import LoadOptions, open_checkpoint, wrap_model
from sinkscope.checkpoints.sources import find_source

Edit = Callable[[dict[str, torch.Tensor]], object]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")


def edit_weights(folder: Path, edit: Edit) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    edit(weights)
    save_file(weights, path, metadata={"format": "pt"})


def pickle_weights(folder: Path, name: str = "pytorch_model.bin") -> Path:
    weights = folder / "model.safetensors"
    torch.save(load_file(weights), folder / name)
    weights.unlink()
    return folder / name


def save_tiny(folder: Path, model_type: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    AutoModel.from_config(AutoConfig.for_model(model_type, **sizes)).save_pretrained(folder)
    return folder


BLOCKS = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
PICTURES = {**BLOCKS, "image_size": 32, "patch_size": 8}


# Names and folders


@pytest.mark.parametrize("name", ["no-such-organisation/no-such-model", "no-such-model"])
def test_unknown_name_with_the_hub_out_of_reach(name: str, refused: Refused) -> None:
    message = refused(name)
    assert name in message
    assert "hub" in message


@pytest.mark.parametrize("name", ["./absent", "/absent/folder", "~/absent/folder", "~no-such-user/folder", "a/b/c"])
def test_absent_folder(name: str, refused: Refused) -> None:
    assert refused(name) == f"no such model folder: {name}"


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="a path that is too long is then one that does not exist")
def test_a_name_that_no_path_can_have(refused: Refused) -> None:
    assert refused("a" * 5000) == f"no such model: {'a' * 197}... (File name too long)"


def test_empty_name(refused: Refused) -> None:
    assert refused("").startswith("an argument is empty: a name or a path is needed")


def test_unknown_example(refused: Refused) -> None:
    message = refused("example:nonesuch")
    assert "nonesuch" in message
    assert "gemma-3-270m" in message


def test_folder_without_config(copied: Path, refused: Refused) -> None:
    (copied / "config.json").unlink()
    assert "config.json" in refused(copied)


def test_file_that_is_no_checkpoint(copied: Path, refused: Refused) -> None:
    assert "give its folder" in refused(copied / "model.safetensors")


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 5021\n"


def test_a_pointer_of_git_lfs_is_called_so(copied: Path, refused: Refused) -> None:
    (copied / "model.safetensors").write_text(POINTER, "utf-8")
    said = f"{copied / 'model.safetensors'} is a Git LFS pointer, not the file itself: run `git lfs pull` in its folder"
    assert refused(copied) == said


@pytest.mark.parametrize("text", ['{"model_type": "llama",', "", "[1, 2]", "{}", "null", '{"model_type": "nonesuch"}'])
def test_damaged_config(text: str, copied: Path, refused: Refused) -> None:
    (copied / "config.json").write_text(text, "utf-8")
    assert copied.name in refused(copied)


def test_binary_config(copied: Path, refused: Refused) -> None:
    (copied / "config.json").write_bytes(bytes(range(128, 256)))
    assert "config.json is damaged" in refused(copied)


def test_config_with_a_value_of_the_wrong_type_names_the_field(copied: Path, refused: Refused) -> None:
    edit_config(copied, hidden_size="many")
    message = refused(copied)
    assert "hidden_size" in message
    assert not message.endswith(":")


# Weights


@pytest.mark.parametrize("keep", [0, 5, 200, 0.5, 0.999])
def test_truncated_safetensors(keep: float, copied: Path, refused: Refused) -> None:
    path = copied / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    message = refused(copied)
    assert "model.safetensors" in message
    assert "truncated" in message


def test_folder_without_weights(copied: Path, refused: Refused) -> None:
    (copied / "model.safetensors").unlink()
    assert "holds no weights" in refused(copied)


def test_absent_shard(copied: Path, refused: Refused) -> None:
    names = list(load_file(copied / "model.safetensors"))
    (copied / "model.safetensors").rename(copied / "model-00001-of-00002.safetensors")
    shards = {name: f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors" for name in names}
    (copied / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}), "utf-8")
    assert "model-00002-of-00002.safetensors" in refused(copied)


def test_torch_s_distributed_format_is_read_whole(copied: Path, tiny_folder: Path) -> None:
    """transformers loads every file of such a folder, in the place of model.safetensors."""
    weights = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    names = [f"shard-0000{rank}-model-00001-of-00001.safetensors" for rank in range(2)]
    for number, file in enumerate(names):
        save_file(dict(list(weights.items())[number::2]), copied / file, metadata={"format": "pt"})
    assert find_source(str(copied)).weights == tuple(names)


@pytest.mark.parametrize("name", ["layers.1.self_attn.k_proj.weight", "embed_tokens.weight", "norm.weight"])
def test_missing_tensor_is_refused_by_name(name: str, copied: Path, refused: Refused) -> None:
    edit_weights(copied, lambda weights: weights.pop(f"model.{name}"))
    assert name in refused(copied)


def test_missing_pooler_is_no_harm(tmp_path: Path, scan_cli: Scan) -> None:
    folder = save_tiny(tmp_path / "bert", "bert", **BLOCKS, vocab_size=90, max_position_embeddings=64)

    def drop(weights: dict[str, torch.Tensor]) -> None:
        for key in [key for key in weights if "pooler" in key]:
            del weights[key]

    before = len(load_file(folder / "model.safetensors"))
    edit_weights(folder, drop)
    assert len(load_file(folder / "model.safetensors")) == before - 2
    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"input_ids": [3, 4] * 20}) + "\n", "utf-8")
    model = open_checkpoint(str(folder)).model
    assert scan(model, data=[[3, 4] * 8]).summary.complete is True


@pytest.mark.parametrize("named", ["flash_attention_2", "someone/kernel"])
def test_the_config_s_own_attention_implementation_is_not_loaded(named: str, copied: Path, tiny_folder: Path) -> None:
    """It may be another package, or code that transformers would fetch from the Hub."""
    edit_config(copied, _attn_implementation=named)
    model = open_checkpoint(str(copied), LoadOptions()).model
    assert model.config._attn_implementation == "sdpa"
    ids = torch.arange(3, 13)[None]
    with torch.no_grad():
        expected = open_checkpoint(str(tiny_folder), LoadOptions()).model(ids)[0]
        assert torch.equal(model(ids)[0], expected)


def test_weights_of_layers_that_the_config_leaves_out_are_named(copied: Path, scan_cli: Scan) -> None:
    """One layer is measured of the two that the folder holds."""
    edit_config(copied, num_hidden_layers=1)
    outcome = scan_cli(copied)
    line = (
        f"{copied} holds weights of layers that LlamaModel has no place for, as its config.json describes it: "
        "model.layers.1.input_layernorm.weight and 8 more; they are not measured"
    )
    assert outcome.code == 0
    assert outcome.warnings[0] == line
    assert outcome.json("manifest")["warnings"][0] == outcome.json("summary")["warnings"][0] == line
    assert len(outcome.json("manifest")["attention"]) == 1


@pytest.mark.parametrize("head", [False, True])
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_a_weight_inside_a_layer_that_has_no_place_is_named(prefix: str, head: bool, copied: Path) -> None:
    """A bias that the model would not add, in a checkpoint saved with its head or without it."""

    def add_bias(weights: dict[str, torch.Tensor]) -> None:
        own = {name.removeprefix("model.") if not prefix else name: weights.pop(name) for name in list(weights)}
        weights |= own | {f"{prefix}layers.0.self_attn.q_proj.bias": torch.ones(64)}

    edit_weights(copied, add_bias)
    (line,) = open_checkpoint(str(copied), LoadOptions(head=head)).warnings
    assert f" {prefix}layers.0.self_attn.q_proj.bias; " in line


ORDINARY = {
    "lm_head.weight": (500, 64),
    "score.weight": (2, 64),
    "classifier.0.weight": (2, 64),
    "pooler.dense.weight": (64, 64),
    "model.rotary_emb.inv_freq": (8,),
    "model.layers.0.self_attn.rotary_emb.inv_freq": (8,),
    "model.layers.1.self_attn.bias": (1, 1, 8, 8),
    "model.layers.1.self_attn.masked_bias": (),
}
"""Heads, and buffers that older checkpoints hold of each layer."""


def test_heads_and_buffers_are_no_harm(copied: Path) -> None:
    edit_weights(copied, lambda weights: weights.update({key: torch.zeros(shape) for key, shape in ORDINARY.items()}))
    assert open_checkpoint(str(copied)).warnings == []


def test_an_ordinary_checkpoint_gives_no_warning(tiny_folder: Path, tmp_path: Path) -> None:
    """A causal language model without its head and with it; BERT with a classifier; GPT-2."""
    assert open_checkpoint(str(tiny_folder)).warnings == []
    assert open_checkpoint(str(tiny_folder), LoadOptions(head=True)).warnings == []
    bert = AutoConfig.for_model("bert", vocab_size=30, **BLOCKS)
    AutoModelForSequenceClassification.from_config(bert).save_pretrained(tmp_path / "bert")
    gpt2 = AutoConfig.for_model("gpt2", vocab_size=30, n_embd=32, n_layer=1, n_head=4)
    AutoModelForCausalLM.from_config(gpt2).save_pretrained(tmp_path / "gpt2")
    for name in ("bert", "gpt2"):
        assert open_checkpoint(str(tmp_path / name)).warnings == []


def test_weights_of_another_shape_name_the_tensor(copied: Path, refused: Refused) -> None:
    edit_config(copied, intermediate_size=128)
    assert "mlp" in refused(copied)


@pytest.mark.parametrize("check", [(), ("--no-self-check",)], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "name", ["layers.1.self_attn.k_proj.weight", "layers.1.self_attn.v_proj.weight", "layers.0.mlp.up_proj.weight"]
)
def test_nan_weights_are_refused_by_name(name: str, check: tuple[str, ...], copied: Path, refused: Refused) -> None:
    edit_weights(copied, lambda weights: weights[f"model.{name}"][3, 3].fill_(torch.nan))
    assert name in refused(copied, *check)


@pytest.mark.parametrize(("dtype", "kind"), [(torch.int8, "I8"), (torch.float8_e4m3fn, "F8_E4M3")])
def test_codes_without_a_quantization_config_are_refused_by_name(
    dtype: torch.dtype, kind: str, copied: Path, refused: Refused
) -> None:
    def encode(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if name.endswith("proj.weight")]:
            weights[name] = weights[name].mul(100).to(dtype)

    edit_weights(copied, encode)
    message = refused(copied)
    assert f"layers.0.mlp.down_proj.weight are stored as {kind}" in message
    assert "quantization_config" in message


def test_a_buffer_of_integers_is_no_harm(copied: Path) -> None:
    edit_weights(copied, lambda weights: weights.update({"model.embed_tokens.position_ids": torch.arange(4)}))
    open_checkpoint(str(copied))


def test_overflow_in_half_precision_says_so(copied: Path, refused: Refused) -> None:
    """Finite weights whose products exceed float16."""
    edit_weights(copied, lambda weights: weights["model.layers.1.self_attn.q_proj.weight"].mul_(60_000.0))
    assert "float32" in refused(copied, "--dtype", "float16")


# Pickled weights


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.pth", "model.pt"])
def test_pickled_weights_need_leave(name: str, copied: Path, refused: Refused) -> None:
    pickle_weights(copied, name)
    assert "--allow-pickle" in refused(copied)


def test_pickled_weights_give_the_same_numbers(tiny_folder: Path, copied: Path, scan_cli: Scan) -> None:
    pickle_weights(copied)
    pickled, safe = scan_cli(copied, "--allow-pickle", name="a"), scan_cli(tiny_folder, name="b")
    assert pickled.code == safe.code == 0
    assert (pickled.folder / "heads.csv").read_bytes() == (safe.folder / "heads.csv").read_bytes()


def test_pickled_code_is_never_run(copied: Path, refused: Refused, tmp_path: Path) -> None:
    class Payload:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    torch.save({"weight": Payload()}, pickle_weights(copied))
    assert copied.name in refused(copied, "--allow-pickle")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"nothing of the kind", b"", b"\x80", b"junk", b"PK\x03\x04", None, 3, [1, 2]])
def test_damaged_pickle(content: Any, copied: Path, refused: Refused) -> None:
    """`it lacks 1785425525`, `it gives no reason` and `index out of range` are what the libraries say."""
    path = pickle_weights(copied)
    if content is None:
        content = path.read_bytes()[:5000]
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    assert refused(copied, "--allow-pickle") == (
        f"{copied}: its pickled weights (pytorch_model.bin) are damaged or hold more than tensors; download them "
        "again, or convert them to safetensors"
    )


# GGUF


def write_whole_gguf(path: Path, said: int, held: int) -> Path:
    """A GGUF of a tiny Llama whose header says that it has `said` layers, with the weights of `held`."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, "llama")
    writer.add_block_count(said)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(48)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_context_length(64)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(100)
    square, wide = (32, 32), (48, 32)
    names = {"attn_norm": (32,), "ffn_norm": (32,), "attn_q": square, "attn_k": square, "attn_v": square}
    names |= {"attn_output": square, "ffn_gate": wide, "ffn_up": wide, "ffn_down": wide[::-1]}
    shapes = {"token_embd": (100, 32), "output_norm": (32,), "output": (100, 32)}
    shapes |= {f"blk.{layer}.{name}": shape for layer in range(held) for name, shape in names.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", np.full(shape, 0.1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("data", [b"", b"GGUF", b"garbage" * 100, b"GGUF\x03\0\0\0" + b"\xff" * 64], ids=len)
def test_damaged_gguf(data: bytes, tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert "model.gguf is damaged" in refused(path)


@pytest.mark.parametrize("keep", [30, 60, 150, 0.5, 0.99])
def test_truncated_gguf(keep: float, tmp_path: Path, refused: Refused) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    assert "model.gguf is damaged" in refused(path)


def test_gguf_that_lacks_weights(tmp_path: Path, refused: Refused) -> None:
    assert "model.gguf" in refused(write_gguf(tmp_path / "model.gguf"))


@pytest.mark.parametrize("said", [1, 2])
def test_layers_past_a_gguf_s_own_number_are_named(said: int, tmp_path: Path) -> None:
    path = write_whole_gguf(tmp_path / "model.gguf", said, held=2)
    named = f"{path} holds weights of layers that LlamaModel has no place for, as its header describes it: "
    expected = [] if said == 2 else [f"{named}blk.1.attn_norm.weight and 8 more; they are not measured"]
    assert open_checkpoint(str(path)).warnings == expected


def test_absent_gguf(tmp_path: Path, refused: Refused) -> None:
    assert refused(tmp_path / "model.gguf").startswith("no such file")


def test_folder_of_a_gguf_points_to_the_file(tmp_path: Path, refused: Refused) -> None:
    path = write_gguf(tmp_path / "model.gguf")
    assert str(path) in refused(tmp_path)


# Code of the checkpoint's own


@pytest.fixture
def with_code(copied: Path) -> tuple[Path, Path]:
    """A checkpoint of a type only its own module knows, and the file that shows that its code ran."""
    ran = copied.parent / "ran"
    edit_config(
        copied,
        model_type="mystery",
        auto_map={"AutoConfig": "modeling_mystery.Config", "AutoModel": "modeling_mystery.Model"},
    )
    code = f"""
from pathlib import Path
from transformers import LlamaConfig, LlamaModel
Path({str(ran)!r}).touch()
class Config(LlamaConfig):
    model_type = "mystery"
class Model(LlamaModel):
    config_class = Config
"""
    (copied / "modeling_mystery.py").write_text(code, "utf-8")
    return copied, ran


def test_code_of_the_checkpoint_is_refused_at_once(with_code: tuple[Path, Path], refused: Refused) -> None:
    folder, ran = with_code
    assert "--trust-remote-code" in refused(folder, stdin="y\ny\n")
    assert not ran.exists()


def test_code_of_the_checkpoint_runs_with_leave(
    with_code: tuple[Path, Path], tiny_folder: Path, scan_cli: Scan, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = with_code
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder.parent / "modules"))
    outcome = scan_cli(folder, "--trust-remote-code", name="a")
    assert outcome.code == 0, outcome.stderr
    assert ran.exists()
    assert outcome.json("manifest")["model"]["class"] == "Model"
    plain = scan_cli(tiny_folder, name="b")
    assert (outcome.folder / "heads.csv").read_bytes() == (plain.folder / "heads.csv").read_bytes()


def test_code_of_the_tokenizer_is_refused_too(copied: Path, refused: Refused) -> None:
    path = copied / "tokenizer_config.json"
    settings = json.loads(path.read_text("utf-8"))
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}
    path.write_text(json.dumps(settings), "utf-8")
    ran = copied.parent / "ran"
    code = f"from pathlib import Path\nfrom transformers import PreTrainedTokenizerFast\nPath({str(ran)!r}).touch()\n"
    (copied / "own.py").write_text(code + "class Own(PreTrainedTokenizerFast): pass\n", "utf-8")
    assert "--trust-remote-code" in refused(copied, stdin="y\ny\n")
    assert not ran.exists()


# Models that are not for us


@pytest.mark.parametrize("spec", ["prose", "random"])
def test_image_model_is_refused(spec: str, tmp_path: Path, refused: Refused) -> None:
    folder = save_tiny(tmp_path / "vit", "vit", **PICTURES)
    assert "text models" in refused(folder, "--data", spec)


def test_two_towered_model_is_refused(tmp_path: Path, refused: Refused) -> None:
    text = {**BLOCKS, "vocab_size": 90, "bos_token_id": 0, "eos_token_id": 1}
    folder = save_tiny(tmp_path / "clip", "clip", text_config=text, vision_config=PICTURES)
    assert "CLIPModel" in refused(folder, "--data", "random")


def test_model_without_attention_is_refused(tmp_path: Path, refused: Refused) -> None:
    folder = save_tiny(tmp_path / "mamba", "mamba", vocab_size=90, hidden_size=32, num_hidden_layers=1, state_size=4)
    assert "no softmax attention" in refused(folder, "--data", "random")


# Tokenizers


def test_absent_tokenizer(copied: Path, refused: Refused, scan_cli: Scan, tmp_path: Path) -> None:
    for path in copied.glob("tokenizer*"):
        path.unlink()
    message = refused(copied)
    assert "tokenizer" in message
    assert "input_ids" in message
    ids = tmp_path / "ids.jsonl"
    ids.write_text("".join(json.dumps({"input_ids": list(range(n, n + 40))}) + "\n" for n in (3, 9)), "utf-8")
    outcome = scan_cli(copied, "--data", ids)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["model"]["tokenizer"] is None
    assert scan_cli(copied, "--data", "random", name="random").code == 0
    text = tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": "some words of text " * 40}) + "\n", "utf-8")
    assert "has no usable tokenizer (no vocabulary files)" in refused(copied, "--data", text, name="text")


@pytest.mark.slow
def test_damaged_tokenizer(copied: Path, refused: Refused, scan_cli: Scan) -> None:
    (copied / "tokenizer.json").write_text("{", "utf-8")
    texts = copied.parent / "texts.jsonl"
    texts.write_text(json.dumps({"text": "some words of text " * 40}) + "\n", "utf-8")
    for data in ("prose", texts):
        said = f"no usable tokenizer ({copied / 'tokenizer.json'} is damaged or truncated (Expecting"
        assert said in refused(copied, "--data", data)
    (copied / "tokenizer.json").write_text(POINTER, "utf-8")
    assert "tokenizer.json is a Git LFS pointer" in refused(copied)
    (copied / "tokenizer.json").write_text("[" * 100_000, "utf-8")
    assert "tokenizer.json is damaged: its values are nested too deeply" in refused(copied)
    assert scan_cli(copied, "--data", "random").code == 0


# Loading


def test_unknown_device_and_dtype(tiny_folder: Path, refused: Refused) -> None:
    for device in ("toaster", "meta", "cuda:99", ""):
        assert repr(device) in refused(tiny_folder, "--device", device)
    assert "device 'gpu' is none: use auto, cpu, cuda, cuda:N or mps" in refused(tiny_folder, "--device", "gpu")
    assert "int8" in refused(tiny_folder, "--dtype", "int8")


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has mps")
def test_absent_backend_is_told_briefly(tiny_folder: Path, refused: Refused) -> None:
    assert len(refused(tiny_folder, "--device", "mps")) < 300


@pytest.mark.parametrize(
    ("place", "ways"),
    [("nonsense", "auto, balanced, balanced_low_0, sequential, cpu"), ("meta", "auto"), ("disk", "auto"),
     ({"": "nonsense"}, "disk, cpu"), ({"layers": "cpu", "": "auto"}, "disk"), ({"": 99}, "disk")],
)  # fmt: skip
def test_a_device_map_with_a_place_that_is_not_here(place: Any, ways: str, tiny_folder: Path) -> None:
    named = [*place.values()][-1] if isinstance(place, dict) else place
    with pytest.raises(SinkscopeError, match=rf"^--device-map {named!r} is no place on this machine: give {ways}"):
        open_checkpoint(str(tiny_folder), LoadOptions(device_map=place))


def test_a_router_that_chooses_more_experts_than_there_are(tmp_path: Path) -> None:
    sizes = {**BLOCKS, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 99, "num_local_experts": 2}
    folder = save_tiny(tmp_path, "gpt_oss", **sizes, num_experts_per_tok=3)
    said = r"its configuration has 3 experts chosen for a token, of 2 \(layers\.0\.mlp\.router\): it is damaged"
    for given in (str(folder), AutoModel.from_pretrained(folder).eval()):
        with pytest.raises(SinkscopeError, match=said):
            scan(given, data=[[1, 2, 3]])


@pytest.mark.slow
def test_device_map_gives_the_same_numbers(tiny_folder: Path, scan_cli: Scan) -> None:
    mapped, plain = scan_cli(tiny_folder, "--device-map", "cpu", name="a"), scan_cli(tiny_folder, name="b")
    assert mapped.code == 0, mapped.stderr
    assert (mapped.folder / "heads.csv").read_bytes() == (plain.folder / "heads.csv").read_bytes()


def test_revision_of_a_folder_is_refused(tiny_folder: Path, refused: Refused) -> None:
    """A folder has no revisions: taking the option silently would put a false claim into the command line."""
    assert "--revision" in refused(tiny_folder, "--revision", "v2")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_dtype_is_obeyed_and_recorded(dtype: str, tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--dtype", dtype)
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["model"]["dtype"] == dtype
    heads = pd.read_csv(outcome.folder / "heads.csv")
    assert heads["bos_mass"].between(0, 1).all()


def test_facts_of_a_checkpoint(tiny_folder: Path, tiny_model: Any, copied: Path) -> None:
    checkpoint = open_checkpoint(str(tiny_folder))
    facts = checkpoint.facts
    assert facts["class"] == "LlamaModel"
    assert facts["parameters"] == sum(p.numel() for p in tiny_model.base_model.parameters())
    assert facts["max_positions"] == 512
    assert not checkpoint.model.training
    assert facts["weights_sha256"] == open_checkpoint(str(copied)).facts["weights_sha256"]
    edit_weights(copied, lambda weights: weights["model.norm.weight"].add_(1e-3))
    assert facts["weights_sha256"] != open_checkpoint(str(copied)).facts["weights_sha256"]


def test_user_settings_of_transformers_are_restored(tiny_folder: Path) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    open_checkpoint(str(tiny_folder))
    with pytest.raises(SinkscopeError):
        open_checkpoint(str(tiny_folder), LoadOptions(dtype="int8"))
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_model_in_training_mode_is_refused() -> None:
    with pytest.raises(SinkscopeError, match="training mode"):
        wrap_model(make_model().train())


@pytest.mark.parametrize("thing", [3, None, torch.nn.Linear(2, 2), {}])
def test_things_that_are_no_model(thing: Any) -> None:
    with pytest.raises(SinkscopeError, match="model"):
        scan(thing, data=[[3, 4, 5]])


@pytest.mark.parametrize(("source", "target"), [(99, 50), (50, 99)])
def test_both_parts_of_an_encoder_decoder_know_every_id(source: int, target: int) -> None:
    sizes = {"d_model": 16, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "max_position_embeddings": 64}
    layers = {f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")}
    config = FSMTConfig(langs=["en", "de"], src_vocab_size=source, tgt_vocab_size=target, **sizes, **layers)
    assert wrap_model(FSMTModel(config).eval()).vocabulary == 50


def test_a_model_of_vectors_has_no_vocabulary() -> None:
    with pytest.raises(SinkscopeError, match="TriggerModel has no token embedding: its vocabulary is unknown"):
        _ = open_checkpoint("example:trigger-softmax").vocabulary


def test_a_name_that_the_room_does_not_give() -> None:
    """Its names are loaded when they are asked for, so that the command line starts without torch."""
    with pytest.raises(ImportError, match="cannot import name 'nonesuch'"):
        from sinkscope.checkpoints import nonesuch  # type: ignore[attr-defined]  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(("family", "limit"), [("llama", 64), ("gpt2", 64), ("bert", 64), ("roberta", 62)])
def test_length_is_checked_against_the_positions(
    family: str, limit: int, tmp_path: Path, tokenizer: Any, refused: Refused, scan_cli: Scan
) -> None:
    """RoBERTa's positions start after the padding id: two of its rows are never used."""
    key = "n_positions" if family == "gpt2" else "max_position_embeddings"
    special = {"bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1}
    sizes = {**BLOCKS, **special, "vocab_size": 500, key: 64, "num_key_value_heads": 4}
    folder = save_tiny(tmp_path / family, family, **sizes)
    tokenizer.save_pretrained(folder)
    assert f"give {limit} or less" in refused(folder, "--seq-len", limit + 1)
    assert scan_cli(folder, "--seq-len", limit).code == 0
