"""Scans on a simulated accelerator (tests/support/accelerator.py): the same tables, and no mix of devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerator import DEVICE, accelerator
from families import speech_inputs, tiny_model
from modeling_planted import planted
from modeling_torch import torch_model
from models import FAMILIES, random_ids, tiny
from pictured import inputs, see
from tiers import slow_but
from torch import nn
from transformers import AutoModel, DynamicCache
from writers import CACHE, prompt, writer

import sinkscope
from sinkscope.capture import rows
from sinkscope.experiments.attention_map import attention_map
from sinkscope.metrics.spectra import SpectrumEntropy, full
from sinkscope.runs.run import Run

LENGTH = 90


@pytest.fixture
def device() -> Iterator[torch.device]:
    with accelerator() as device, torch.no_grad():
        yield device


def same_tables(run: Run, other: Run) -> None:
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.warnings == other.manifest.warnings
    for name, table in other.tables().items():
        pd.testing.assert_frame_equal(run.tables()[name], table, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(FAMILIES, "gpt_oss"))
def test_a_model_on_a_device(family: str) -> None:
    model, ids = tiny(family).requires_grad_(False), random_ids(3, LENGTH)
    plain = sinkscope.scan(model, data=ids, smoothing=True)
    with accelerator() as device, torch.no_grad():
        run = sinkscope.scan(model.to(device), data=ids, smoothing=True)
        assert {parameter.device.type for parameter in model.parameters()} == {device.type}
    same_tables(run, plain)


def homes(model: nn.Module, device: torch.device) -> list[tuple[nn.Module, torch.device]]:
    """The second layer there; every other layer, the embeddings and the norms around them on the CPU."""
    layers = next(part for part in model.modules() if isinstance(part, nn.ModuleList))
    inside = {id(part) for layer in layers for part in layer.modules()}
    around = [part for part in model.modules() if id(part) not in inside and not list(part.children())]
    here = torch.device("cpu")
    return [(part, here) for part in around] + [
        (layer, device if number == 1 else here) for number, layer in enumerate(layers)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(FAMILIES, "gemma3"))
def test_a_model_over_two_devices(family: str) -> None:
    """Its second layer alone is elsewhere; accelerate's hooks carry what it reads there, and the next layer's back."""
    model, ids = tiny(family).requires_grad_(False), random_ids(3, LENGTH)
    plain = sinkscope.scan(model, data=ids, smoothing=True)
    with accelerator() as device, torch.no_grad():
        for part, home in homes(model, device):
            add_hook_to_module(part.to(home), AlignDevicesHook(execution_device=home, place_submodules=False))
        assert {parameter.device.type for parameter in model.parameters()} == {"cpu", device.type}
        run = sinkscope.scan(model, data=ids, smoothing=True)
    same_tables(run, plain)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_padding_on_a_device(family: str) -> None:
    model, ids = tiny(family).requires_grad_(False), random_ids(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[0, :30], mask[1, 70:] = 0, 0
    data = {"input_ids": ids, "attention_mask": mask}
    plain = sinkscope.scan(model, data=data)
    with accelerator() as device, torch.no_grad():
        same_tables(sinkscope.scan(model.to(device), data=data), plain)


OTHERS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "pictures in text": lambda: (see("llava"), inputs("llava")),
    "pictures": lambda: (tiny_model(AutoModel, "dinov2"), {"pixel_values": torch.randn(2, 3, 32, 32)}),
    "recordings": lambda: speech("whisper"),
    "code of its own": lambda: (planted(causal=False), random_ids(3, 70)),
    "torch's attention": lambda: (torch_model(kind="weights", batch_first=True, causal=False), random_ids(3, 40)),
}


def speech(family: str) -> tuple[nn.Module, Any]:
    model = tiny_model(AutoModel, family)
    return model, speech_inputs(family, model.config)


@pytest.mark.slow
@pytest.mark.parametrize("family", slow_but(["llama", "gpt_oss", "gpt2"], "gpt_oss"))
def test_steps_over_a_cache_there(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What each step leaves stays on the device, and is copied there, five steps at once."""
    monkeypatch.setattr(rows, "TOGETHER", 5)
    model, ids = writer(family).requires_grad_(False), prompt()["input_ids"]
    plain = written(model, ids)
    with accelerator() as device:
        run = written(model.to(device), ids.to(device))
    same_tables(run, plain)


def written(model: nn.Module, ids: torch.Tensor) -> Run:
    """The run of what a model writes, token by token, over one cache."""
    cache, now = DynamicCache(config=model.config), ids
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for _ in range(13):
            now = model(now, **{CACHE: cache}).logits[:, -1:].argmax(-1)
    return seen.run()


@pytest.mark.parametrize("kind", slow_but(OTHERS, "pictures", "code of its own"))
def test_inputs_given_there_too(kind: str) -> None:
    model, data = OTHERS[kind]()
    plain = sinkscope.scan(model.requires_grad_(False), data=data)
    with accelerator() as device, torch.no_grad():
        given = {name: each.to(device) for name, each in data.items()} if isinstance(data, dict) else data.to(device)
        same_tables(sinkscope.scan(model.to(device), data=given), plain)


@pytest.mark.slow
def test_spectra_beside_a_device_s_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are handed over at once, and waited for where too much is under way."""
    monkeypatch.setattr("sinkscope.metrics.spectra.HANDED_BYTES", 1)
    x = torch.randn(2, LENGTH, 64, generator=torch.Generator().manual_seed(0))
    with accelerator() as device:
        held = SpectrumEntropy.of(x.to(device))
        assert not held.held
        held.jobs[0] = Future()  # one that no thread ends
        assert full([held])
        held.cancel()
        assert held.jobs[0].cancelled()
    model, ids = tiny("llama").requires_grad_(False), random_ids(5, LENGTH)
    plain = sinkscope.scan(model, data=ids, spectra=4)
    with accelerator() as device, torch.no_grad():
        same_tables(sinkscope.scan(model.to(device), data=ids, spectra=4, batch_size=2), plain)


@pytest.mark.slow
def test_a_checkpoint_is_put_there(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a Mac: `auto` chooses mps; the scan, the ablation and the map of a head."""
    options: dict[str, Any] = {"num_sequences": 3, "seq_len": 24}
    plain = sinkscope.scan(str(tiny_folder), device="cpu", **options)
    plain.save(tmp_path / "run")
    ablation = sinkscope.ablate(str(tiny_folder), tmp_path / "run", draws=2, fractions=[0.5], device="cpu", **options)
    weights, _ = attention_map(str(tiny_folder), "some words of text", [0, 1], 1, 0, device="cpu")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with accelerator() as device, torch.no_grad():
        run = sinkscope.scan(str(tiny_folder), **options)
        again = sinkscope.ablate(str(tiny_folder), tmp_path / "run", draws=2, fractions=[0.5], **options)
        there, _ = attention_map(str(tiny_folder), "some words of text", [0, 1], 1, 0)
    assert run.manifest.model.device == device.type
    same_tables(run, plain)
    pd.testing.assert_frame_equal(again.table, ablation.table, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(there, weights, atol=1e-6)


def test_the_device_has_a_device_s_rules(device: torch.device) -> None:
    x = torch.ones(3).to(device)
    assert x.device.type == DEVICE.type
    assert (x + 1).sum().item() == 6
    assert torch.equal((x * 2).cpu(), torch.full((3,), 2.0))
    for forbidden in (x.double, lambda: x + torch.ones(3), lambda: torch.ones(3)[x.long()]):
        with pytest.raises((RuntimeError, TypeError)):
            forbidden()
