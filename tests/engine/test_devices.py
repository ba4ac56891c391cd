"""A model spread over devices and disk by accelerate's device map: the same numbers, and nothing left behind."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from models import tiny

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint
from sinkscope.runs.run import Run

PARTS = ("embed_tokens", "layers.0", "layers.1", "layers.2", "norm", "rotary_emb")
SOME = {**dict.fromkeys(PARTS, "cpu"), "layers.1": "disk", "layers.2": "disk"}
MOST = {**SOME, "embed_tokens": "disk", "layers.0": "disk", "layers.1": "cpu", "norm": "disk"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen3"
    tiny("qwen3", attention_bias=True).save_pretrained(folder)
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SINKSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def scanned(model: Path, **options: Any) -> Run:
    return sinkscope.scan(str(model), data="random", num_sequences=3, seq_len=40, smoothing=True, **options)


@pytest.fixture(scope="module")
def plain(model: Path) -> Run:
    return scanned(model)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device_map", "device"),
    [
        pytest.param("auto", "cpu", id="auto"),
        pytest.param(SOME, "cpu, disk", id="some"),
        pytest.param(MOST, "cpu, disk", id="most", marks=pytest.mark.slow),
    ],
)
def test_layers_on_the_disk_give_the_same_tables(
    device_map: Any, device: str, model: Path, plain: Run, cache: Path
) -> None:
    run = scanned(model, device_map=device_map)
    if not torch.cuda.is_available():
        assert run.manifest.model.device == device
    assert run.manifest.self_check.status == "passed"
    for name, table in plain.tables().items():
        pd.testing.assert_frame_equal(run.tables()[name], table, rtol=1e-6, atol=1e-6)
    assert run.heads["residual_write"].notna().all(), "the output projections were read"
    assert run.smoothing is not None
    assert run.smoothing["rank_w"].notna().all()


@pytest.mark.slow
def test_the_offload_folder_goes_with_the_model(model: Path, cache: Path) -> None:
    checkpoint = open_checkpoint(str(model), LoadOptions(device_map=SOME, dtype="float64"))
    assert [path.name.startswith(".offload-") for path in cache.iterdir()] == [True]
    assert checkpoint.device == torch.device("cpu")
    del checkpoint
    gc.collect()
    assert list(cache.iterdir()) == []


def test_a_map_that_cannot_be_used_leaves_no_folder(model: Path, cache: Path) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="cannot load"):
        open_checkpoint(str(model), LoadOptions(device_map={"layers": "disk"}))
    assert list(cache.iterdir()) == []


def test_damaged_weights_on_the_disk_are_named(model: Path, tmp_path: Path, cache: Path) -> None:
    damaged = tiny("llama")
    with torch.no_grad():
        damaged.layers[2].self_attn.o_proj.weight[-1, -1] = torch.nan
    damaged.save_pretrained(tmp_path / "damaged")
    with pytest.raises(sinkscope.SinkscopeError, match=r"layers\.2\.self_attn\.o_proj\.weight hold NaN"):
        scanned(tmp_path / "damaged", device_map=SOME)
