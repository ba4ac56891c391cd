"""Parts that hold numbers of the device against others: the kernels' own cases, one layer, and whole families."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as Tree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from families import FAST_CAUSAL, LENGTH, tiny_model
from models import FAMILIES, random_ids, tiny
from ratios import shape_of
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from sinkscope.capture import Capture, plan
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels.attend import TRITON, kernel_of, read
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.collector import Collector, Parts
from sinkscope.metrics.quantities import quantity_set
from sinkscope.runs.defaults import EPSILON

ROOT = Path(__file__).parents[2]
GROUPS = ("shapes", "features", "models")
"""Of tests/support/kernel_cases.py. `models` makes tables, and is left out where a library for these is missing."""
BOUND = 1e-5
"""Of the kernels' sums against float64."""
NEAR = 1e-4
"""Of a family's values on the device against those on the CPU, beside the largest of 1 and the value."""
OTHERS = {
    "bert": AutoModelForMaskedLM,
    "deberta-v2": AutoModelForMaskedLM,
    "t5": AutoModelForSeq2SeqLM,
}
"""The fast tier's text models besides causal ones, with the class that builds each."""

PYTEST = """
import sys
end = sys.argv.index("--")
sys.path[:] = sys.argv[1:end]
import pytest
sys.exit(pytest.main(sys.argv[end + 1:]))
"""
"""Runs pytest with the path of this process, at whose end stands what was brought."""

Figures = dict[str, Any]


def cases(group: str, device: str) -> tuple[Figures, bool]:
    """Runs one group of the kernels' cases by pytest."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "cases.xml"
        environment = os.environ | {
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "TRITON_INTERPRET": "1" if device == "cpu" else "0",
        }
        command = [
            sys.executable, "-c", PYTEST, *sys.path, "--", "-q", "--noconftest", "-o", "addopts=",
            "-o", "filterwarnings=default", "-p", "no:cacheprovider", f"--junitxml={report}",
            str(ROOT / "tests" / "support" / "kernel_cases.py"), "-k", group,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
        if not report.exists():
            return {"said": (done.stdout + done.stderr)[-1500:]}, False
        return counted(Tree.parse(report).getroot())


def counted(root: Tree.Element) -> tuple[Figures, bool]:
    """How many cases passed, failed and were left out, and the words of the first failure."""
    tests = list(root.iter("testcase"))
    bad = [test for test in tests if test.find("failure") is not None or test.find("error") is not None]
    skipped = sum(test.find("skipped") is not None for test in tests)
    figures: Figures = {"passed": len(tests) - len(bad) - skipped, "failed": len(bad), "left out": skipped}
    if bad:
        words = next(each for each in bad[0] if each.tag in ("failure", "error"))
        figures["first failure"] = f"{bad[0].get('name')}: {words.get('message', '')[:300]}"
    return figures, bool(tests) and not bad


def one_layer(shape: str, dtype: str, device: str, is_tiny: bool) -> tuple[Figures, bool]:
    """The kernels' sums of one attention call of the shape, against the whole matrix in float64."""
    heads, groups, width = shape_of(shape, is_tiny).heads
    length = 64 if is_tiny else 2048
    generator = torch.Generator().manual_seed(0)

    def draw(count: int) -> Tensor:
        drawn = torch.randn(1, length, count, width, generator=generator).transpose(1, 2)
        return drawn.to(device, getattr(torch, dtype))

    call = AttentionCall(draw(heads), draw(groups), draw(groups), causal=True, scaling=width**-0.5)
    failures: list[str] = []
    _, sums = read(call, failures)
    expected = in_float64(call)
    figures: Figures = {name: worst(getattr(sums, name), value) for name, value in expected.items()}
    passed = all(figure <= BOUND for figure in figures.values()) and computed(device, {kernel_of(call)}, failures)
    return figures | {"kernel": kernel_of(call), **said(failures)}, passed


def computed(device: str, kernels: set[str], failures: list[str]) -> bool:
    """Whether Triton computed what it had to: on a GPU everything, since torch in its place would hide a fault."""
    return not failures and (TRITON in kernels or device == "cpu")


def said(failures: list[str]) -> Figures:
    """Why Triton failed, where it did."""
    return {"Triton failed": failures[0]} if failures else {}


def in_float64(call: AttentionCall) -> dict[str, Tensor]:
    """Sums of a causal call, head by head: the whole matrix of all heads would not fit beside a model."""
    length = call.query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=call.query.device).triu(1)
    found: dict[str, list[Tensor]] = {"first": [], "entropy": [], "margin": [], "columns": []}
    repeat = call.query.shape[1] // call.key.shape[1]
    for head in range(call.query.shape[1]):
        logits = call.query[0, head].double() @ call.key[0, head // repeat].double().mT * call.scaling
        logits = logits.masked_fill(hidden, -torch.inf)
        a = logits.softmax(-1)
        others = logits[:, 1:].logsumexp(-1)
        found["first"].append(a[:, 0])
        found["entropy"].append(torch.special.entr(a).sum(-1))
        found["margin"].append(torch.where(others > -torch.inf, logits[:, 0] - others, torch.nan))
        found["columns"].append(a.sum(0))
    return {name: torch.stack(values)[None] for name, values in found.items()}


def worst(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference beside the largest of 1 and the value; infinity where shape, NaN or infinity differ."""
    one, other = ours.detach().cpu().double(), theirs.detach().cpu().double()
    if one.shape != other.shape or not torch.equal(one.isnan(), other.isnan()):
        return float("inf")
    apart = torch.where(one == other, 0.0, (one - other).abs() / other.abs().clamp(min=1.0)).nan_to_num(0.0)
    return float(apart.max()) if apart.numel() else 0.0


def named_families() -> dict[str, Callable[[], nn.Module]]:
    """What builds each family of the fast tier that reads text, by name; `own-` marks the tests' seeded models."""

    def built(auto: Any, name: str) -> Callable[[], nn.Module]:
        return lambda: tiny_model(auto, name)

    def seeded(name: str) -> Callable[[], nn.Module]:
        return lambda: tiny(name)

    found = {name: built(AutoModelForCausalLM, name) for name in FAST_CAUSAL if name != "mamba"}
    found |= {name: built(auto, name) for name, auto in OTHERS.items()}
    return found | {f"own-{name}": seeded(name) for name in FAMILIES}


def family(name: str, device: str) -> tuple[Figures, bool]:
    """Every value that a scan collects of a tiny model, on the device against the CPU."""
    model = wrap_model(named_families()[name]()).model.requires_grad_(False)
    ids = random_ids(2, LENGTH if not name.startswith("own-") else 70)
    plain, torch_kernels, _ = collected(model, ids)
    ours, kernels, failures = collected(model.to(device), ids.to(device))
    figures: Figures = {"worst": 0.0, "of": "", "kernels": "+".join(sorted(kernels)), **said(failures)}
    for label, distance in distances(ours, plain).items():
        if not distance <= figures["worst"]:
            figures |= {"worst": distance, "of": label}
    near = figures["worst"] <= NEAR and ours.keys() == plain.keys()
    return figures, near and (not torch_kernels or computed(device, kernels, failures))


def collected(model: nn.Module, ids: Tensor) -> tuple[Parts, set[str], list[str]]:
    """What a scan collects of one batch, what computed its attention calls (nothing of ours where the model's own code
    does), and why Triton failed."""
    forward = Forward(model)
    with torch.no_grad():
        found = plan(model, lambda: forward(ids[:1, :16]))
        collector = Collector(ids.shape[1])
        collector.begin()
        with Capture(model, found, collector.add, EPSILON).watching(None, ids.shape[1]):
            forward(ids)
    return collector.commit(), {site.kernel for site in found.sites if site.kernel}, found.failures


def distances(ours: Parts, theirs: Parts) -> dict[str, float]:
    """The largest distance of each quantity of each site. Events are compared in number alone: a value beside a
    threshold may fall on either side of it."""
    dims = {each.name: each.dims for each in quantity_set().quantities}
    found = {}
    for site, parts in theirs.items():
        for part, own in zip(parts, ours[site], strict=True):
            for name, value in part.values.items():
                label = f"{site} {name}"
                if dims[name][0] != "event":
                    found[label] = worst(own.values[name], value) if name in own.values else float("inf")
    return found
