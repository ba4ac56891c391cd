"""The contract with undocumented parts of transformers, peft, gguf and compressed-tensors: each function of
`checkpoints/private_doors.py` works on the installed versions, and where a part is gone its error names it. Runs at
both ends of the supported range.
"""

from __future__ import annotations

import errno
import json
import re
import threading
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import peft
import pytest
import torch
from conftest import make_tokenizer
from ggufs import write_gguf
from libraries import library
from peft.utils import other
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import nn
from torch.distributed import fsdp
from transformers import AutoConfig, AutoModel, LlamaConfig, LlamaModel
from transformers.models.whisper import tokenization_whisper

from sinkscope.checkpoints import private_doors as doors
from sinkscope.errors import SinkscopeError

pytestmark = pytest.mark.filterwarnings("ignore")  # peft's own, on settings that it does not know

SMALL: dict[str, Any] = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
                         "num_attention_heads": 2, "bos_token_id": 0, "eos_token_id": 0}  # fmt: skip


def raised(work: Callable[[], Any]) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - of any class: its text is what is read
        work()
    return found.value  # type: ignore[return-value]


def configured(folder: Path, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(settings), "utf-8")
    return folder


# gguf


def test_transformers_opens_and_converts_through_the_package(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf")
    own = gguf.GGUFReader, gguf.dequantize
    readers: list[Any] = []
    shapes: list[Any] = []
    with doors.watching_gguf(readers.append, lambda weights: shapes.append(weights.shape)):
        model = AutoModel.from_pretrained(tmp_path, gguf_file="model.gguf", ignore_mismatched_sizes=True)
    assert (gguf.GGUFReader, gguf.dequantize) == own
    names = {str(tensor.name) for reader in readers for tensor in reader.tensors}
    assert len(names) == len(shapes) == 1
    assert model.config.model_type == "llama"


def test_threads_that_watch_at_one_time_hear_of_their_own_files_and_leave_nothing(tmp_path: Path) -> None:
    """The one that came first leaves first: the other's replacement must not stay for ever."""
    write_gguf(tmp_path / "model.gguf")
    own, heard = gguf.GGUFReader, {"first": 0, "second": 0}
    entered, left = threading.Event(), threading.Event()

    def watch(name: str) -> None:
        def opened(_: Any) -> None:
            heard[name] += 1

        with doors.watching_gguf(opened, lambda weights: None):
            if name == "first":
                entered.wait(30)
            else:
                entered.set()
            gguf.GGUFReader(tmp_path / "model.gguf")
            if name == "second":
                left.wait(30)
        left.set()

    threads = [threading.Thread(target=watch, args=(name,)) for name in heard]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {"first": 1, "second": 1}
    assert gguf.GGUFReader is own


# transformers


def test_errors_of_a_checkpoint_that_brings_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("raise RuntimeError\n")
    configured(tmp_path, model_type="own", auto_map={"AutoConfig": "own.Own", "AutoModel": "own.Own"})
    assert doors.asks_for_own_code(raised(lambda: AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)))
    assert not doors.asks_for_own_code(ValueError("something else"))


@pytest.mark.parametrize("settings", [{"model_type": "of_tomorrow"}, {"hidden_size": 8}])
def test_errors_of_an_unknown_type(settings: dict[str, Any], tmp_path: Path) -> None:
    configured(tmp_path, **settings)
    assert doors.is_unknown_type(raised(lambda: AutoConfig.from_pretrained(tmp_path)))
    assert not doors.is_unknown_type(ValueError("something else"))


def test_errors_of_a_model_that_cannot_be_spread() -> None:
    from transformers.distributed import DistributedConfig

    model = AutoModel.from_config(AutoConfig.for_model("gpt2", n_embd=8, n_layer=1, n_head=2, vocab_size=8))
    if not hasattr(model, "_resolve_parallel_plans"):
        pytest.skip("this transformers leaves such a model whole, without an error")
    assert doors.lacks_tensor_plan(raised(lambda: model._resolve_parallel_plans(DistributedConfig(tp_size=2))))
    assert not doors.lacks_tensor_plan(ValueError("something else"))


def test_the_report_on_a_loading(tmp_path: Path) -> None:
    model = LlamaModel(LlamaConfig(**SMALL))
    weights = {key: weight for key, weight in model.state_dict().items() if not key.startswith("norm")}
    weights |= {"layers.0.mlp.up_proj.weight": torch.zeros(3, 8), "layers.7.mlp.up_proj.weight": torch.zeros(8, 8)}
    model.save_pretrained(tmp_path, state_dict=weights)
    _, report = LlamaModel.from_pretrained(tmp_path, output_loading_info=True, ignore_mismatched_sizes=True)
    missing, mismatched, unexpected = doors.loading_report(report)
    assert missing == ["norm.weight"]
    assert [(key, tuple(found), tuple(needed)) for key, found, needed in mismatched] == [
        ("layers.0.mlp.up_proj.weight", (3, 8), (8, 8))
    ]
    assert unexpected == ["layers.7.mlp.up_proj.weight"]


def test_weights_that_stay_float32() -> None:
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2, "vocab_size": 8}
    model = AutoModel.from_config(AutoConfig.for_model("t5", **sizes))
    names = {name for name, _ in model.named_parameters()}
    kept = {dtype: set(filter(doors.kept_in_float32(model, dtype), names)) for dtype in (torch.float16, torch.float32)}
    assert kept[torch.float16] == {name for name in names if ".wo." in name} != set()
    assert not kept[torch.float32]


def test_a_tokenizer_s_rules_do_not_hold_what_its_calls_set() -> None:
    tokenizer = make_tokenizer()
    before = doors.tokenizer_rules(tokenizer.backend_tokenizer)
    tokenizer(["a", "a longer text"], truncation=True, max_length=3, padding=True)
    assert '"truncation":null' not in tokenizer.backend_tokenizer.to_str()
    assert doors.tokenizer_rules(tokenizer.backend_tokenizer) == before
    assert '"vocab"' in before


def test_whisper_s_languages() -> None:
    codes = doors.language_codes()
    assert (codes["german"], codes["english"]) == ("de", "en")


# peft


def adapted(**settings: Any) -> Any:
    return peft.get_peft_model(LlamaModel(LlamaConfig(**SMALL)), peft.LoraConfig(target_modules=["q_proj"], **settings))


def test_an_adapter_s_configuration() -> None:
    config = doors.adapter_config({"peft_type": "LORA", "r": 3, "a_setting_of_tomorrow": 5})
    assert (type(config), config.r) == (peft.LoraConfig, 3)
    assert not doors.puts_tokens_before(config)
    assert doors.puts_tokens_before(peft.PrefixTuningConfig(num_virtual_tokens=2))
    assert doors.puts_tokens_before(peft.AdaptionPromptConfig(adapter_len=2, adapter_layers=1))


def test_the_names_of_an_adapter_s_weights() -> None:
    model = adapted(modules_to_save=["norm"])
    marks = doors.marks_of_adapter(model)
    keys = [key for key in model.state_dict() if any(mark in key for mark in marks)]
    ends = {".".join(key.split(".")[-4:]) for key in keys}
    assert ends == {
        "q_proj.lora_A.default.weight", "q_proj.lora_B.default.weight",
        "input_layernorm.modules_to_save.default.weight",
        "post_attention_layernorm.modules_to_save.default.weight", "norm.modules_to_save.default.weight",
    }  # fmt: skip


def test_errors_of_peft() -> None:
    model = LlamaModel(LlamaConfig(**SMALL))
    error = raised(lambda: peft.get_peft_model(model, peft.LoraConfig(target_modules=["layers"])))
    assert doors.unsuitable_class(error) == "ModuleList"
    assert doors.unsuitable_class(ValueError("something else")) is None
    two, three = (adapted(r=rank) for rank in (2, 3))
    weights = peft.get_peft_model_state_dict(three)
    line = doors.misshapen(raised(lambda: peft.set_peft_model_state_dict(two, weights)))
    assert line is not None
    assert "lora_A" in line
    assert doors.misshapen(ValueError("something else")) is None


# compressed-tensors


def test_weights_that_a_first_pass_would_unpack(tmp_path: Path) -> None:
    library("compressed_tensors")
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config

    model: Any = nn.Sequential(nn.Linear(8, 8))
    weight = model[0].weight.detach().clone()
    scheme = QuantizationScheme(targets=["Linear"], weights={"num_bits": 8, "strategy": "channel"})
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}))
    model[0].weight_scale.data.copy_(weight.abs().amax(1, keepdim=True) / 127)
    ModelCompressor.from_pretrained_model(model).compress_model(model)
    assert "weight" not in dict(model[0].named_parameters())
    doors.unpack(model)
    assert torch.allclose(model[0].weight, weight, atol=0.01)
    doors.unpack(model)  # nothing is left to do
    model.ct_decompress_hook = None
    doors.unpack(model)


def test_a_hook_of_another_kind_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sinkscope.capture.private_doors.version", lambda library: "9.0")
    model: Any = nn.Linear(2, 2)
    model.ct_decompress_hook = "something else"
    with pytest.raises(SinkscopeError, match=r"compressed-tensors 9\.0 has no .*ct_decompress_hook"):
        doors.unpack(model)


# Weights that are spread over processes


def test_fsdp_has_its_classes() -> None:
    assert all(getattr(fsdp, name).__name__ == name for name in doors.SHARDED)
    assert doors.is_fsdp(object.__new__(type("FSDPLinear", (fsdp.FSDPModule, nn.Linear), {})))
    assert not doors.is_fsdp(nn.Linear(2, 2))


def test_zero3_numbers_its_parameters() -> None:
    """As in DeepSpeed's own `is_zero_param`."""
    parameter = nn.Parameter(torch.zeros(1))
    assert not doors.is_zero3(parameter)
    parameter.ds_id = 0  # type: ignore[attr-defined]
    assert doors.is_zero3(parameter)


def test_why_safetensors_could_not_write(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="I/O error") as caught:
        save_file({"a": torch.zeros(2)}, tmp_path / "absent" / "file")
    assert doors.why_not_written(caught.value) == "No such file or directory"
    full = SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
    assert doors.why_not_written(full) == "No space left on device"
    assert doors.why_not_written(OSError(errno.ENOSPC, "No space left on device")) == "No space left on device"
    assert doors.why_not_written(ValueError("Value: too long")) == "Value: too long"


# What is gone

Break = Callable[[pytest.MonkeyPatch], None]
OTHER_JSON = SimpleNamespace(to_str=lambda: '{"added_tokens":[],"truncation":null,"padding":null}')
GONE: list[tuple[str, str, Break, Callable[[], Any]]] = [
    ("gguf", "gguf.dequantize", lambda patch: patch.delattr(gguf, "dequantize"),
     lambda: doors.watching_gguf(print, print).__enter__()),
    ("transformers", "mismatched_keys in the loading report", lambda patch: None,
     lambda: doors.loading_report({"missing_keys": [], "unexpected_keys": []})),
    ("transformers", "PreTrainedModel._get_dtype_plan", lambda patch: None,
     lambda: doors.kept_in_float32(nn.Linear(2, 2), torch.float16)),
    ("tokenizers", "added_tokens after truncation and padding in a serialised tokenizer", lambda patch: None,
     lambda: doors.tokenizer_rules(OTHER_JSON)),
    ("transformers", "models.whisper.tokenization_whisper.TO_LANGUAGE_CODE",
     lambda patch: patch.delattr(tokenization_whisper, "TO_LANGUAGE_CODE"), doors.language_codes),
    ("peft", "PeftConfig.check_kwargs", lambda patch: patch.delattr(peft.config.PeftConfigMixin, "check_kwargs"),
     lambda: doors.adapter_config({"peft_type": "LORA"})),
    ("peft", "PeftConfig.is_prompt_learning", lambda patch: None, lambda: doors.puts_tokens_before(SimpleNamespace())),
    ("peft", "BaseTuner.prefix", lambda patch: None,
     lambda: doors.marks_of_adapter(SimpleNamespace(base_model=SimpleNamespace()))),
    ("peft", "utils.other.ModulesToSaveWrapper", lambda patch: patch.delattr(other, "ModulesToSaveWrapper"),
     lambda: doors.marks_of_adapter(SimpleNamespace(base_model=SimpleNamespace(prefix="lora_")))),
]  # fmt: skip


@pytest.mark.parametrize(("library", "part", "take_away", "use"), GONE, ids=[part for _, part, *_ in GONE])
def test_a_part_that_is_gone_is_named(
    library: str, part: str, take_away: Break, use: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_away(monkeypatch)
    with pytest.raises(SinkscopeError) as refused:
        use()
    assert str(refused.value).startswith(f"{library} {version(library)} has no {part}, which sinkscope relies on: try")


def test_every_door_is_tried_here() -> None:
    defined = {name for name, value in vars(doors).items() if getattr(value, "__module__", "") == doors.__name__}
    used = set(re.findall(r"doors\.(\w+)", Path(__file__).read_text("utf-8")))
    assert {name for name in defined if not name.startswith("_")} - used == set()
