"""Rare ends of a scan: models that outgrow a device or carry too little, self-checks that stray, forced interrupts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Outcome, Refused, Scan
from models import random_ids, tiny
from pictured import inputs, see
from transformers import AutoModel, LlamaModel, PreTrainedModel

import sinkscope
from sinkscope import SinkscopeError, load_run
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.loading import pick_device
from sinkscope.checkpoints.sources import find_source


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
    assert words in refused(tiny_folder)


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


def test_weights_that_overflow_after_the_self_check(
    copied: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Finite weights whose attention is NaN: the layer is named, and the dtype blamed."""
    from safetensors.torch import load_file, save_file

    weights = load_file(copied / "model.safetensors")
    weights["model.layers.1.self_attn.q_proj.weight"] *= 60_000.0
    save_file(weights, copied / "model.safetensors", metadata={"format": "pt"})
    told = refused(copied, "--dtype", "float16", "--no-self-check")
    assert told.startswith(
        "layer 1 (layers.1.self_attn) gives NaN or infinity although all weights are finite: float16"
    )


def test_half_precision_that_strays_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone may pass the bound; float32 in its place would be an error."""
    from sinkscope.engine import self_check

    monkeypatch.setitem(self_check.BOUNDS, torch.bfloat16, 1e-9)
    run = sinkscope.scan(tiny("llama").to(torch.bfloat16), data=random_ids(2, 40))
    assert run.manifest.self_check.status == "warning"
    (told,) = [warning for warning in run.manifest.warnings if warning.startswith("self-check")]
    assert "more than the 1e-09 that half precision explains; try --dtype float32" in told


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
    from typer.testing import CliRunner

    from sinkscope.cli import app

    def interrupted(ids: torch.Tensor) -> None:
        raise KeyboardInterrupt

    other = shutil.copytree(tiny_folder, tmp_path / "other")
    patch_forward(interrupted)
    words = ["scan", str(tiny_folder), str(other), "--seq-len", "32", "--out", str(tmp_path / "runs")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 130
    assert done.stderr == "sinkscope: interrupted\n", "the second model is not scanned"


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
