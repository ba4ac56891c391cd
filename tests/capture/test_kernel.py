"""The Triton kernels: run under Triton's interpreter, and when they are used.

`kernel_cases` checks their numbers. It runs in a process of its own, because Triton's interpreter is switched on for a
whole process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn import make_call
from models import random_ids, tiny

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend as attention
from sinkscope.capture.kernels import triton_call as fused
from sinkscope.capture.kernels.attend import attend_in_blocks
from sinkscope.errors import SinkscopeError

CASES = Path(__file__).parents[1] / "support" / "kernel_cases.py"
GROUPS = ("shapes", "features", "models")
CAUSAL, _ = make_call((1, 4, 2, 40, 8), "causal", "softmax")


def run_cases(group: str, interpreted: bool) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    if interpreted:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-o", "addopts=", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(
        [*command, "-k", group], check=False, capture_output=True, text=True, env=environment, timeout=900
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_interpreted(group: str) -> None:
    pytest.importorskip("triton")
    run_cases(group, interpreted=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("group", GROUPS)
def test_on_a_gpu(group: str) -> None:
    run_cases(group, interpreted=False)


@pytest.fixture
def willing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretends that Triton compiles on this machine and has not failed yet."""
    monkeypatch.setattr(attention, "_compiles", lambda device: True)
    monkeypatch.setattr(attention, "_triton_failed", threading.Event())


@pytest.mark.usefixtures("willing")
def test_unsupported_calls_are_walked_over() -> None:
    wide = torch.zeros(1, 4, 40, 577)
    assert attention.kernel_of(CAUSAL) == attention.TRITON
    for call in (
        replace(CAUSAL, score="relu"),
        replace(CAUSAL, query=CAUSAL.query.double(), key=CAUSAL.key.double(), value=CAUSAL.value.double()),
        replace(CAUSAL, value=CAUSAL.value.half()),
        replace(CAUSAL, query=wide, key=wide[:, :2]),
        replace(CAUSAL, value=torch.zeros(1, 2, 40, 513)),
    ):
        assert attention.kernel_of(call) == attention.TORCH
        assert torch.equal(attention.read(call)[0], attend_in_blocks(call)[0])
    assert attention.kernel_of(replace(CAUSAL, query=CAUSAL.query.clone().requires_grad_())) == attention.TORCH
    with pytest.raises(SinkscopeError, match="the attention score 'max': choose one of relu, sigmoid"):
        attention.read(replace(CAUSAL, score="max"))


def test_a_cpu_is_the_walk_s() -> None:
    assert attention.kernel_of(CAUSAL) == attention.TORCH


@pytest.mark.usefixtures("willing")
def test_a_kernel_that_fails_is_said_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[AttentionCall] = []
    failures: list[str] = []

    def fail(call: AttentionCall) -> None:
        tried.append(call)
        raise RuntimeError("PTX was compiled with\nan unsupported toolchain")

    monkeypatch.setattr(fused, "attend", fail)
    for _ in range(2):
        output, sums = attention.read(CAUSAL, failures)
        expected, theirs = attend_in_blocks(CAUSAL)
        assert torch.equal(output, expected)
        assert torch.equal(sums.columns, theirs.columns)
    assert len(tried) == 1
    (line,) = failures
    assert line == ("Triton failed, attention is read by torch: PTX was compiled with an unsupported toolchain")


@pytest.mark.usefixtures("willing")
def test_a_scan_tells_of_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(call: AttentionCall) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(fused, "attend", fail)
    run = sinkscope.scan(tiny("llama"), data=random_ids(1, 20))
    assert run.manifest.warnings == ["Triton failed, attention is read by torch: no"]
    assert run.summary.warnings == run.manifest.warnings
    assert {site.kernel for site in run.manifest.attention} == {attention.TORCH}


@pytest.mark.usefixtures("willing")
def test_a_later_scan_does_not_inherit_the_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second scan does not try Triton again and reports torch as the kernel; only the first has the warning."""
    tried = []

    def fail(call: AttentionCall) -> None:
        tried.append(call)
        raise RuntimeError("no")

    monkeypatch.setattr(fused, "attend", fail)
    first, second = (sinkscope.scan(tiny("llama", num_hidden_layers=1), data=random_ids(1, 20)) for _ in range(2))
    assert first.manifest.warnings == ["Triton failed, attention is read by torch: no"]
    assert second.manifest.warnings == second.summary.warnings == []
    assert {site.kernel for site in second.manifest.attention} == {attention.TORCH}
    assert len(tried) == 1


@pytest.mark.usefixtures("willing")
def test_a_failure_in_mid_scan_is_told_of_every_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def fail(call: AttentionCall) -> Any:
        calls.append(call)
        if len(calls) > 4:  # the dry run and the self-check of two layers
            raise RuntimeError("no")
        return attend_in_blocks(call)

    monkeypatch.setattr(fused, "attend", fail)
    run = sinkscope.scan(tiny("llama", num_hidden_layers=2), data=random_ids(2, 20))
    assert len(run.manifest.warnings) == 1
    assert {site.kernel for site in run.manifest.attention} == {"triton, then torch blocks"}


@pytest.mark.usefixtures("willing")
def test_memory_that_runs_out_is_raised_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def fail(call: AttentionCall) -> None:
        raise error

    monkeypatch.setattr(fused, "attend", fail)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        attention.read(CAUSAL, failures := [])
    assert raised.value is error
    assert not failures
    assert attention.kernel_of(CAUSAL) == attention.TRITON


@pytest.mark.slow
def test_kernels_are_not_imported_unless_one_is_launched() -> None:
    """The kernels' modules import triton, which a machine without a GPU may not have."""
    program = "import sys, sinkscope.capture; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    names = done.stdout.split()
    assert "sinkscope.capture.kernels.triton_call" in names
    assert "sinkscope.capture.kernels.triton_kernels" not in names
    assert "sinkscope.capture.kernels.triton_kernels" not in names
