"""Rare ends of a scan: models that outgrow a device or carry too little, self-checks that stray, forced interrupts."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, Refused, Scan
from families import tiny_model
from models import random_ids, tiny
from pictured import inputs, see
from transformers import AutoModel, LlamaModel, PreTrainedModel
from transformers.models.llama import modeling_llama
from typer.testing import CliRunner

import sinkscope
from sinkscope import SinkscopeError, load_run
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.loading import pick_device
from sinkscope.checkpoints.sources import find_source
from sinkscope.cli import app
from sinkscope.trigger.model import TriggerModel


def out_of_memory(*args: Any, **kwargs: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


@pytest.mark.parametrize(
    ("owner", "name", "words"),
    [(AutoModel, "from_pretrained", "does not fit into the device's memory"),
     (PreTrainedModel, "to", "the model does not fit on cpu: try --dtype bfloat16 or --device-map auto")],
)  # fmt: skip
def test_a_model_larger_than_the_device(
    owner: Any, name: str, words: str, tiny_folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, out_of_memory)
    assert words in refused(tiny_folder, "--device", "cpu")


def test_a_gpu_is_taken_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert pick_device("auto") == torch.device("cuda")


def test_a_package_that_the_model_s_code_needs(copied: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any, **kwargs: Any) -> None:
        raise ImportError("LlamaModel requires the kernels library\nand how to install it")

    monkeypatch.setattr(AutoModel, "from_pretrained", absent)
    told = f"{copied} needs a package that is not installed: LlamaModel requires the kernels library"
    assert refused(copied) == told


def test_a_cache_that_cannot_hold_what_a_device_map_sends_to_disk(
    tiny_folder: Path, tmp_path: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", "utf-8")
    monkeypatch.setenv("SINKSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    assert refused(tiny_folder, "--device-map", "auto").startswith(f"cannot write the cache {tmp_path / 'file'}")


def test_tp_gives_each_process_its_own_device(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert "--tp gives each process a GPU of its own" in refused("none", "--tp", "--device", "cpu")


@pytest.mark.parametrize("measured", [(), ("--measure", "all")], ids=["plain", "all"])
def test_weights_that_overflow_after_the_self_check(
    measured: tuple[str, ...], copied: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights whose attention is NaN: the layer is named, and the dtype blamed."""
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] *= 60_000.0
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    told = refused(copied, "--dtype", "float16", "--no-self-check", *measured)
    assert told.startswith(
        "layer 1 (layers.1.self_attn) gives NaN or infinity although all weights are finite: float16"
    )


@pytest.mark.parametrize(
    ("dtype", "told"),
    [
        ("bfloat16", "bfloat16 overflows; try --dtype float32"),
        ("float32", "float32 overflows; try --dtype float64"),
        ("float64", "float64 overflows, and no dtype is wider: the model's own numbers are not finite"),
    ],
)
def test_the_dtype_to_try_is_wider_than_the_one_that_overflows(dtype: str, told: str) -> None:
    model = tiny("llama").to(getattr(torch, dtype))
    with torch.no_grad():
        for projection in (model.layers[1].self_attn.q_proj, model.layers[1].self_attn.k_proj):
            projection.weight *= 10 * torch.finfo(model.dtype).max ** 0.5
    for checked, words in ((False, "layer 1 .* gives NaN or infinity"), (True, "self-check: attention of .* is NaN")):
        with pytest.raises(sinkscope.SinkscopeError, match=words) as refused:
            sinkscope.scan(model, data=random_ids(2, 40), self_check=checked)
        assert str(refused.value).endswith(told)


def test_half_precision_that_strays_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone may pass the bound; float32 in its place would be an error."""
    from sinkscope.engine import self_check

    monkeypatch.setitem(self_check.BOUNDS, torch.bfloat16, 1e-9)
    run = sinkscope.scan(tiny("llama").to(torch.bfloat16), data=random_ids(2, 40))
    assert run.manifest.self_check.status == "warning"
    (told,) = [warning for warning in run.manifest.warnings if warning.startswith("self-check")]
    assert "more than the 1e-09 that half precision explains; try --dtype float32" in told


def test_a_score_without_maps_to_compare_with_is_not_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference in float64 is softmax's, and ReLU attention that returns no maps has no other."""
    forward = TriggerModel.forward

    def without_maps(self: Any, *args: Any, output_attentions: bool = False, **kwargs: Any) -> Any:
        if output_attentions:
            raise TypeError("forward() got an unexpected keyword argument 'output_attentions'")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(TriggerModel, "forward", without_maps)
    run = sinkscope.scan("example:trigger-relu", num_sequences=2)
    check = run.manifest.self_check
    assert (check.status, check.layers, check.max_difference) == ("not possible", 0, None)
    assert "self-check not possible: the model gives no eager attention maps" in run.manifest.warnings


def test_eager_maps_beside_another_output_are_no_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """An output of another shape cannot be compared, so nothing says that its maps are those of the model's output."""
    forward = LlamaModel.forward

    @functools.wraps(forward)
    def last_alone(self: Any, **kwargs: Any) -> Any:
        found = forward(self, **kwargs)
        if kwargs.get("output_attentions"):
            found.last_hidden_state = found.last_hidden_state[:, -1:]
        return found

    monkeypatch.setattr(LlamaModel, "forward", last_alone)
    check = sinkscope.scan(tiny("llama"), data=random_ids(2, 40)).manifest.self_check
    assert check.status == "passed"
    assert check.reference == "float64 attention from each layer's own queries, keys and mask"
    assert check.reason == "eager attention computes another output (relative difference nan)"


@pytest.mark.parametrize("length", [12, 40])
def test_a_model_that_is_not_what_its_eager_attention_computes_is_noted(
    length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The maps agree and the outputs do not: something beside the probabilities differs, here the values' scale."""
    eager = modeling_llama.eager_attention_forward

    def doubled(*args: Any, **kwargs: Any) -> Any:
        output, maps = eager(*args, **kwargs)
        return 2 * output, maps

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", doubled)
    check = sinkscope.scan(tiny("llama", num_hidden_layers=1), data=random_ids(2, length)).manifest.self_check
    assert (check.status, check.tokens) == ("passed", length)
    assert check.reference == "float64 attention from each layer's own queries, keys and mask"
    assert check.reason is not None
    assert check.reason.startswith("eager attention computes another output (relative")
    assert check.eager_difference is None


def test_a_model_that_attends_otherwise_where_it_is_eager_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama", num_hidden_layers=2), random_ids(1, 12)

    def eager_map() -> torch.Tensor:
        model.set_attn_implementation("eager")
        with torch.no_grad():
            found = model(ids, output_attentions=True).attentions[0].double()
        model.set_attn_implementation("sdpa")
        return found

    measured, eager = eager_map(), modeling_llama.eager_attention_forward
    monkeypatch.setattr(
        modeling_llama, "eager_attention_forward",
        lambda module, query, *rest, **keywords: eager(module, 3 * query, *rest, **keywords),
    )  # fmt: skip
    run = sinkscope.scan(model, data=ids)
    difference = measured - eager_map()
    columns = difference.sum(-2) / torch.arange(12.0, 0.0, -1.0).double()
    expected = float(torch.maximum(difference[..., 0].abs().max(), columns.abs().max()))
    check = run.manifest.self_check
    assert check.status == "passed"
    assert check.eager_difference == pytest.approx(expected, abs=1e-6)
    warned = f"loaded with attn_implementation='eager', this model attends otherwise: by up to {expected:.2g} in"
    assert [warning[: len(warned)] for warning in run.summary.warnings] == [warned]


@pytest.mark.slow
def test_an_interrupted_scan_does_not_replace_a_finished_run(
    tiny_folder: Path, scan_cli: Scan, patch_forward: Any
) -> None:
    """--force was meant for a whole run in its place."""
    whole = scan_cli(tiny_folder)
    heads = (whole.folder / "heads.csv").read_bytes()
    calls = iter(range(1, 1000))

    def before(ids: torch.Tensor) -> None:
        if next(calls) == 7:
            raise KeyboardInterrupt

    patch_forward(before)
    outcome: Outcome = scan_cli(tiny_folder, "--force", "--num-sequences", 6, "--batch-size", 2)
    assert outcome.code == 130
    assert (whole.folder / "heads.csv").read_bytes() == heads
    part = whole.folder.with_name("run-interrupted")
    assert f"saved in {part}" in outcome.stderr
    assert load_run(part).manifest.sequences_done == 4


def test_an_interrupt_ends_a_scan_of_several_models(tiny_folder: Path, tmp_path: Path, patch_forward: Any) -> None:
    def interrupted(ids: torch.Tensor) -> None:
        raise KeyboardInterrupt

    other = shutil.copytree(tiny_folder, tmp_path / "other")
    patch_forward(interrupted)
    words = ["scan", str(tiny_folder), str(other), "--seq-len", "32", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 130
    assert done.stderr == "sinkscope: interrupted\n", "the second model is not scanned"


@pytest.mark.slow
def test_an_interrupt_among_several_models_keeps_what_is_measured(
    tiny_folder: Path, tmp_path: Path, patch_forward: Any
) -> None:
    """In the second batch of the first model: the part of its run is saved, and the second model is not scanned."""
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    patch_forward(interrupt_at(3))
    words = ["scan", str(tiny_folder), str(other), "--seq-len", "16", "--num-sequences", "4", "--batch-size", "2"]
    done = CliRunner().invoke(app, [*words, "--no-self-check", "--out", str(tmp_path / "runs")])
    assert done.exit_code == 130
    [line] = done.stderr.splitlines()
    assert line.startswith("sinkscope: interrupted: 2 sequences are measured and saved in")
    assert load_run(tmp_path / "runs" / tiny_folder.name).manifest.sequences_done == 2
    assert not (tmp_path / "runs" / "other").exists()


def interrupt_at(call: int) -> Any:
    """Ctrl-C in the forward pass number `call`; the dry run is the first."""
    calls = iter(range(1, 1000))

    def before(ids: torch.Tensor) -> None:
        if next(calls) == call:
            raise KeyboardInterrupt

    return before


@pytest.mark.parametrize(
    ("call", "words"), [(1, ()), (2, ()), (2, ("--no-self-check",))], ids=["dry run", "self-check", "batch"]
)
def test_an_error_of_the_model_s_own_is_not_called_want_of_memory(
    call: int, words: tuple[str, ...], tiny_folder: Path, scan_cli: Scan, patch_forward: Any
) -> None:
    calls = iter(range(1, 1000))

    def before(ids: torch.Tensor) -> None:
        if next(calls) == call:
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    patch_forward(before)
    outcome = scan_cli(tiny_folder, *words)
    assert (outcome.code, outcome.stdout, len(outcome.stderr.splitlines())) == (2, "", 1)
    assert "mat1 and mat2 shapes cannot be multiplied" in outcome.stderr
    assert "memory" not in outcome.stderr


@pytest.mark.slow
def test_sequences_are_not_taken_for_positions_where_there_are_as_many() -> None:
    """XLNet's positions come first. In a batch of 8 sequences of 8 tokens no shape tells the two apart."""
    model, ids = tiny_model(AutoModel, "xlnet"), random_ids(8, 8) % 90
    square = sinkscope.scan(model, data=ids, batch_size=8, measure="modules", self_check=False)
    whole = sinkscope.scan(model, data=ids, batch_size=1, measure="modules", self_check=False)
    for frame, name in (("layers", "norm_first"), ("layers", "inf_norm"), ("heads", "bos_mass")):
        ours, theirs = (getattr(run, frame)[name].to_numpy() for run in (square, whole))
        assert ours == pytest.approx(theirs, rel=1e-5), name
    assert len(square.measured["modules"]) == len(whole.measured["modules"]) == 0


@pytest.mark.slow
def test_the_trigger_task_has_directions_too() -> None:
    """--smoothing reads its sequences of real vectors."""
    run = sinkscope.scan("example:trigger-softmax", smoothing=True, num_sequences=4)
    assert run.smoothing is not None
    assert len(run.smoothing) == 1


def test_pictures_alone_are_no_input_of_a_model_with_text() -> None:
    given = inputs("llava")
    with pytest.raises(SinkscopeError, match=r"reads token ids, not pixel_values alone: give the input_ids with them"):
        sinkscope.scan(see("llava"), data={"pixel_values": given["pixel_values"]})


def test_a_configuration_that_names_its_weights(copied: Path) -> None:
    """transformers loads that file in the place of model.safetensors."""
    path = copied / "config.json"
    settings = json.loads(path.read_text("utf-8"))
    path.write_text(json.dumps(settings | {"transformers_weights": "named.safetensors"}), "utf-8")
    (copied / "model.safetensors").rename(copied / "named.safetensors")
    assert find_source(str(copied)).weights == ("named.safetensors",)


def test_a_quantised_model_names_its_method() -> None:
    model = tiny("llama")
    model.config.quantization_config = {"quant_method": "awq"}  # type: ignore[assignment]
    assert wrap_model(model).facts["quantization"] == "awq"


def test_a_model_whose_input_has_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaModel, "main_input_name", "molecules")
    with pytest.raises(SinkscopeError, match="LlamaModel reads molecules, which sinkscope cannot give it"):
        sinkscope.scan(tiny("llama"), data=random_ids(1, 20))
