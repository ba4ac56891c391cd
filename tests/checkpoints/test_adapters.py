"""--adapter: a PEFT adapter put into a named model measures as the merged model, or is refused in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import peft
import pytest
import torch
from conftest import Refused, Scan
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint
from sinkscope.cli import app

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, on what transformers has renamed

ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
SHORT: dict[str, Any] = {"seq_len": 24, "num_sequences": 3}

KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(r=3, target_modules=ALL, task_type="CAUSAL_LM"),
    "dora": lambda: peft.LoraConfig(r=3, target_modules=ALL, use_dora=True),
    "rslora": lambda: peft.LoraConfig(r=3, target_modules="all-linear", use_rslora=True),
    "a pattern of names": lambda: peft.LoraConfig(r=3, target_modules=r"model\.layers\.1\..*_proj"),
    "embedding": lambda: peft.LoraConfig(r=3, target_modules=["q_proj", "embed_tokens"]),
    "biases": lambda: peft.LoraConfig(r=3, target_modules=ALL, bias="all"),
    "whole modules": lambda: peft.LoraConfig(r=3, target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
    "pissa": lambda: peft.LoraConfig(r=3, target_modules=ALL, init_lora_weights="pissa"),
    "olora": lambda: peft.LoraConfig(r=3, target_modules=ALL, init_lora_weights="olora"),
    "parameters": lambda: peft.LoraConfig(r=3, target_modules=[], target_parameters=["q_proj.weight"]),
    "ia3": lambda: peft.IA3Config(target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "vera": lambda: peft.VeraConfig(r=8, target_modules=["q_proj", "o_proj"], save_projection=False),
    "loha": lambda: peft.LoHaConfig(r=3, target_modules=ALL),
    "lokr": lambda: peft.LoKrConfig(r=3, target_modules=ALL),
    "adalora": lambda: peft.AdaLoraConfig(init_r=3, target_r=2, total_step=10, target_modules=ALL),
    "oft": lambda: peft.OFTConfig(r=0, oft_block_size=4, target_modules=ALL),
    "boft": lambda: peft.BOFTConfig(boft_block_size=4, target_modules=["q_proj", "o_proj"]),
    "hra": lambda: peft.HRAConfig(r=4, target_modules=ALL),
    "fourierft": lambda: peft.FourierFTConfig(n_frequency=50, target_modules=ALL),
    "layer norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "vblora": lambda: peft.VBLoRAConfig(r=2, num_vectors=16, vector_length=8, target_modules=["q_proj", "o_proj"]),
    "tokens": lambda: peft.TrainableTokensConfig(token_indices=[1, 2, 3], target_modules=["embed_tokens"]),
}

PROMPTS: dict[str, Callable[[], Any]] = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "prefix tuning": lambda: peft.PrefixTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=4, encoder_hidden_size=8, task_type="CAUSAL_LM"),
    "adaption prompt": lambda: peft.AdaptionPromptConfig(adapter_len=4, adapter_layers=1, task_type="CAUSAL_LM"),
}


def quick(cases: dict[str, Any], *names: str) -> list[Any]:
    """All cases by name; those not in `names` are left to the full tier."""
    return [name if name in names else pytest.param(name, marks=pytest.mark.slow) for name in cases]


def adapted(base: Path, config: Any) -> Any:
    """A model with an adapter whose weights are random, in float32 and eval mode."""
    torch.manual_seed(1)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.1 * torch.randn_like(weight))
    return model


def written(base: Path, config: Any, folder: Path) -> Path:
    adapted(base, config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def lora(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of `tiny_folder` on every linear layer but one. Shared: write only into a copy."""
    return written(tiny_folder, KINDS["lora"](), tmp_path_factory.mktemp("adapters") / "lora")


@pytest.fixture
def spoilt(lora: Path, tmp_path: Path) -> Path:
    """A copy of `lora` for the test to damage."""
    return Path(shutil.copytree(lora, tmp_path / "spoilt"))


def setting(folder: Path, **changes: Any) -> Path:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")
    return folder


def same_tables(run: sinkscope.Run, other: sinkscope.Run) -> None:
    tables = ("heads", "layers", "sequences", "length_curve", "smoothing")
    for name in tables:
        own, theirs = getattr(run, name), getattr(other, name)
        assert list(own) == list(theirs)
        assert len(own) == len(theirs) > 0
        for column in own.select_dtypes("number"):
            np.testing.assert_allclose(own[column], theirs[column], rtol=1e-5, atol=1e-5, err_msg=f"{name} {column}")
        pd.testing.assert_frame_equal(own.select_dtypes(exclude="number"), theirs.select_dtypes(exclude="number"))


@pytest.mark.slow
def test_the_adapted_model_measures_as_the_merged_one(tiny_folder: Path, lora: Path, tmp_path: Path) -> None:
    """Every table: what is read from weights (value norms, smoothing) sees the adapter as well as what is captured.

    In float64, since merging rounds: in float32 a smoothing column differs by 3e-5.
    """
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float64)
        peft.PeftModel.from_pretrained(base, lora).merge_and_unload().save_pretrained(tmp_path / "merged")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_folder / name, tmp_path / "merged")
    run = sinkscope.scan(str(tiny_folder), adapter=lora, dtype="float64", smoothing=True, **SHORT)
    same_tables(run, sinkscope.scan(str(tmp_path / "merged"), smoothing=True, self_check=False, **SHORT))
    plain = sinkscope.scan(str(tiny_folder), self_check=False, **SHORT)
    assert not np.allclose(run.heads["entropy"], plain.heads["entropy"], atol=1e-2)
    model, without = run.manifest.model, plain.manifest.model
    assert run.manifest.request.adapter == str(lora)
    assert model.adapter is not None
    assert set(model.adapter.files) == {"adapter_config.json", "adapter_model.safetensors"}
    assert (model.id, model.adapter.base_weights_sha256) == (without.id, without.weights_sha256)
    assert model.weights_sha256 != without.weights_sha256
    assert run.summary.model == f"{tiny_folder.name} with {lora}"
    assert run.manifest.self_check.status == "passed"


def test_the_weights_of_the_base_stay_as_they_are(tiny_folder: Path, lora: Path) -> None:
    plain = open_checkpoint(str(tiny_folder))
    adapted = open_checkpoint(str(tiny_folder), LoadOptions(adapter=str(lora)))
    assert adapted.facts["weights_sha256"] not in (None, plain.facts["weights_sha256"])
    base, own = plain.model.state_dict(), adapted.model.state_dict()
    kept = {key.replace(".base_layer", ""): weight for key, weight in own.items() if "lora_" not in key}
    assert kept.keys() == base.keys()
    assert all(torch.equal(kept[key], base[key]) for key in base)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_computes_what_peft_computes(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    model = adapted(tiny_folder, KINDS[kind]())
    model.save_pretrained(tmp_path / "adapter")
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = model(input_ids=ids, output_hidden_states=True).hidden_states[-1]
        plain = open_checkpoint(str(tiny_folder)).model(input_ids=ids).last_hidden_state
        found = open_checkpoint(str(tiny_folder), LoadOptions(adapter=str(tmp_path / "adapter"))).model(input_ids=ids)
    torch.testing.assert_close(found.last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, expected, atol=1e-2)


@pytest.mark.parametrize("kind", quick(PROMPTS, "prefix tuning"))
def test_tokens_before_the_text_are_refused(kind: str, tiny_folder: Path, tmp_path: Path, refused: Refused) -> None:
    """The first token of the text would not be the first key any more."""
    folder = written(tiny_folder, PROMPTS[kind](), tmp_path / "adapter")
    assert "tokens of its own before the text" in refused(tiny_folder, "--adapter", folder)


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "rank bomb": ({"r": 10**9}, "a rank above 65536"),
    "rank bomb by name": ({"rank_pattern": {"q_proj": 10**9}}, "a rank above 65536"),
    "rank of 0": ({"r": 0}, "says r 0, where a whole number from 1 on is needed"),
    "unknown kind": ({"peft_type": "MAGIC"}, r"names the kind 'MAGIC', which peft [0-9.]+ does not have: update peft"),
    "small letters": ({"peft_type": "lora"}, r"does not have: .* did you mean LORA"),
    "a kept module by its name": ({"modules_to_save": "embed_tokens"}, "'embed_tokens', where a list of names is"),
    "a kept module that is not there": (
        {"modules_to_save": ["embed_tokens"]}, r"adapter_model.safetensors lacks \S+embed_tokens.weight$",
    ),
    "tokens that were not kept": ({"trainable_token_indices": [1]}, r"lacks \S+trainable_tokens_delta$"),
    "a token past the last": ({"trainable_token_indices": [10**9]}, "names a token or a layer that the model does not"),
    "a negative token": ({"trainable_token_indices": [-5]}, r"\[-5\], where a list of token ids is needed"),
    "a broken pattern": ({"target_modules": "("}, "'\\(', where a pattern or a list of names is needed"),
    "a rank of 0 by name": ({"rank_pattern": {"q_proj": 0}}, "where a whole number from 1 on for each name is needed"),
    "no number": ({"lora_alpha": float("nan")}, "says lora_alpha nan, where a number is needed"),
    "whole model": ({"target_modules": ".*"}, "targets a module of class LlamaModel, which peft cannot adapt"),
    "no rank": ({"r": None}, "says r null, where a whole number from 1 on is needed"),
    "no alpha": ({"lora_alpha": None}, "says lora_alpha null, where a number is needed"),
    "a flag in words": ({"use_rslora": "no"}, "says use_rslora 'no', where true or false is needed"),
    "a dropout past 1": ({"lora_dropout": 7}, "says lora_dropout 7, where a number from 0 to 1 is needed"),
    "no settings of a run": ({"runtime_config": 3}, r"peft [0-9.]+ can make nothing of a setting"),
    "no kind": ({"peft_type": None}, "names no peft_type"),
    "code": ({"megatron_config": {"a": 1}, "megatron_core": "antigravity"}, "import Megatron"),
    "a file elsewhere": ({"lora_ga_config": {"cache_file": "/etc/passwd"}}, "names a file of its own"),
    "another base's start": ({"init_lora_weights": "corda"}, "changed its base model's weights"),
    "repeated layers": ({"layer_replication": [[0, 2], [0, 2]]}, "repeats layers"),
    "several adapters": ({"peft_type": "XLORA"}, "mixes several adapters"),
    "starts in the text": ({"alora_invocation_tokens": [3]}, "aLoRA"),
    "other modules": ({"target_modules": ["wq"]}, "does not fit"),
    "too few modules": ({"target_modules": ["q_proj"]}, "no place"),
    "too many modules": ({"target_modules": [*ALL, "gate_proj"]}, "lacks"),
    "other rank": ({"r": 4}, "does not fit.*shape"),
    "a value of a wrong type": ({"r": "many"}, "does not fit|damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", quick(SETTINGS, "rank bomb", "code", "too few modules", "unknown kind", "no rank"))
def test_settings_that_cannot_be_trusted_are_refused(
    name: str, tiny_folder: Path, spoilt: Path, refused: Refused
) -> None:
    changes, said = SETTINGS[name]
    line = refused(tiny_folder, "--adapter", setting(spoilt, **changes))
    assert re.search(said, line), line
    assert not re.search(r"\w(Error|Exception)\b", line), "the class of an exception tells a user nothing"


def test_settings_nested_too_deeply(tiny_folder: Path, spoilt: Path, refused: Refused) -> None:
    deep: Any = []
    for _ in range(150):
        deep = [deep]
    line = refused(tiny_folder, "--adapter", setting(spoilt, more=deep))
    assert line == f"{spoilt}: adapter_config.json is damaged: its values are nested too deeply"


def test_files_that_cannot_be_trusted_are_refused(tiny_folder: Path, spoilt: Path, refused: Refused) -> None:
    weights = spoilt / "adapter_model.safetensors"
    content = weights.read_bytes()
    elsewhere = spoilt.parent / "elsewhere.safetensors"
    elsewhere.write_bytes(content)

    def told() -> str:
        return refused(tiny_folder, "--adapter", spoilt)

    weights.unlink()
    weights.symlink_to(elsewhere)
    assert "outside the adapter's folder" in told()
    weights.unlink()
    assert "holds no adapter_model.safetensors" in told()
    (spoilt / "adapter_model.bin").write_bytes(b"cos\nsystem\n")
    assert "pickled" in told()
    weights.write_bytes(content[:100])
    assert "damaged or truncated" in told()
    tensors = load_file(elsewhere)
    save_file({key: torch.full_like(tensor, float("nan")) for key, tensor in tensors.items()}, weights)
    assert "NaN" in told()
    save_file({key: tensor.to(torch.float8_e4m3fn) for key, tensor in tensors.items()}, weights)
    assert "are stored as float8_e4m3fn, and nothing says what these codes stand for" in told()
    save_file({}, weights)
    assert "holds no weights: save the adapter again" in told()
    (spoilt / "adapter_config.json").write_text("{", "utf-8")
    assert "is damaged" in told()
    (spoilt / "adapter_config.json").unlink()
    assert "holds no adapter_config.json" in told()
    assert "no such adapter folder" in refused(tiny_folder, "--adapter", spoilt / "nothing")


def test_an_adapter_of_another_model_is_refused_or_named(
    tiny_folder: Path, spoilt: Path, refused: Refused, scan_cli: Scan, tmp_path: Path
) -> None:
    setting(spoilt, base_model_name_or_path="someone/other-7b")
    done = scan_cli(tiny_folder, "--adapter", spoilt, "--no-self-check")
    assert done.code == 0
    assert [f"trained on someone/other-7b, and is measured on {tiny_folder}" in line for line in done.warnings] == [
        True
    ]
    tensors = load_file(spoilt / "adapter_model.safetensors")
    wide = {key: torch.zeros(*tensor.shape[:-1], 2 * tensor.shape[-1]) for key, tensor in tensors.items()}
    save_file(wide, spoilt / "adapter_model.safetensors")
    assert "does not fit" in refused(tiny_folder, "--adapter", spoilt, name="wide")


def test_a_rank_far_beyond_the_files_is_refused(
    tiny_folder: Path, spoilt: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the room that any model has, which is more than these layers take at any rank."""
    monkeypatch.setattr("sinkscope.checkpoints.checks.SPARE_NUMBERS", 0)
    assert "far larger than its weights" in refused(tiny_folder, "--adapter", setting(spoilt, r=2000))


def test_what_an_adapter_does_not_go_with(
    tiny_folder: Path, tiny_model: Any, lora: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "--device-map" in refused(tiny_folder, "--adapter", lora, "--device-map", "auto")
    with pytest.raises(sinkscope.SinkscopeError, match="into your model object with peft"):
        sinkscope.scan(tiny_model, data=torch.ones(1, 8, dtype=torch.long), adapter=lora)
    monkeypatch.setattr("sinkscope.checkpoints.adapter_files.find_spec", lambda name: None)
    assert "pip install 'sinkscope[adapters]'" in refused(tiny_folder, "--adapter", lora)


def call(*words: object) -> Any:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.slow
def test_a_run_of_the_base_is_not_taken_for_one_of_the_adapter(tiny_folder: Path, lora: Path, scan_cli: Scan) -> None:
    """`--resume` on the finished run of the base; then the gate and the comparison between the two."""
    base = scan_cli(tiny_folder, "--no-self-check")
    again = scan_cli(tiny_folder, "--adapter", lora, "--resume", "--no-self-check", out=base.folder)
    assert again.code == 2
    assert "holds a finished run with another model" in again.stderr
    failed = call("check", tiny_folder, "--adapter", lora, "--baseline", base.folder, "--quiet")
    assert failed.exit_code == 1
    assert f"{tiny_folder.name} with {lora}" in " ".join(failed.stdout.split())
    table = call("compare", base.folder, tiny_folder, "--adapter", lora, "--quiet", "--json")
    assert table.exit_code == 0, table.stderr
    assert [json.loads(table.stdout)[side]["model"] for side in ("a", "b")] == [
        tiny_folder.name, f"{tiny_folder.name} with {lora}",
    ]  # fmt: skip
    for words in (["compare", tiny_folder], ["compare", base.folder, "--adapter", lora]):
        assert call(*words).exit_code == 2
    both = call("compare", base.folder, base.folder, "--adapter", lora)
    assert both.exit_code == 2
    assert "is a run folder" in both.stderr


@pytest.mark.slow
def test_compare_of_a_model_alone_is_base_against_adapter(tiny_folder: Path, lora: Path) -> None:
    table = call("compare", tiny_folder, "--adapter", lora, "--quiet", "--json", "--metric", "entropy")
    assert table.exit_code == 0, table.stderr
    found = json.loads(table.stdout)
    assert found["b"]["model"] == f"{found['a']['model']} with {lora}"
    assert any(abs(row["difference"]) > 0.1 for row in found["heads"])


def test_a_dry_run_checks_the_adapter_and_says_that_it_does_not_count_it(tiny_folder: Path, lora: Path) -> None:
    told = sinkscope.dry_run(str(tiny_folder), adapter=lora, seq_len=32, machine="h100")
    size = sum((lora / name).stat().st_size for name in ("adapter_config.json", "adapter_model.safetensors"))
    assert told.notes == [f"the adapter's {size:,} bytes and its operations are not counted"]
    with pytest.raises(sinkscope.SinkscopeError, match=r"no adapter_config\.json"):
        sinkscope.dry_run(str(tiny_folder), adapter=tiny_folder, machine="h100")
