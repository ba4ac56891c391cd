"""Nothing that transformers or a quantisation's library logs while a model is loaded or run reaches stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Scan, make_model, make_tokenizer
from torch import nn
from transformers import LlamaModel
from transformers.utils import logging as theirs

from sinkscope.capture.output_projection import projection_bias
from sinkscope.capture.quiet_logs import LOUD
from sinkscope.checkpoints.quiet import quiet_transformers


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is logged while a Llama says at every pass which kernels it lacks, as models with Mamba layers do."""
    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    forward, handler = LlamaModel.forward, Kept()

    @wraps(forward)
    def loud(self: Any, *args: Any, **kwargs: Any) -> Any:
        theirs.get_logger("transformers.integrations").warning("a kernel is not installed")
        logging.getLogger("bitsandbytes.autograd").warning("inputs will be cast")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaModel, "forward", loud)
    for name in LOUD:
        logging.getLogger(name).addHandler(handler)
    yield lines
    for name in LOUD:
        logging.getLogger(name).removeHandler(handler)


@pytest.mark.parametrize("more", [pytest.param((), marks=pytest.mark.slow), ("--generate", 2)])
def test_a_scan_shows_no_line_of_another_library(
    more: tuple[object, ...], told: list[str], tmp_path: Path, scan_cli: Scan
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    outcome = scan_cli(tmp_path / "model", "--quiet", *more)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
    assert told == []


class Rounding(nn.Linear):
    """A layer that says at every call that it rounds what it reads, as bitsandbytes' 8-bit layers do."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        logging.getLogger("bitsandbytes.autograd").warning("inputs will be cast")
        return super().forward(input)


def test_a_layer_that_is_asked_alone_says_nothing(told: list[str]) -> None:
    """Its bias is read outside of the model's own pass."""
    layer = Rounding(4, 3)
    assert torch.equal(projection_bias(layer, 4), layer.bias)
    assert told == []


COMMANDS = {
    "track": ["{step-1}", "{step-2}", "--seq-len", "16", "--num-sequences", "2"],
    "ablate": ["{model}", "--run", "{run}", "--seq-len", "16", "--num-sequences", "2", "--fraction", "0.25"],
    "arms": ["{model}", "keys:first1", "acts:4/token", "dynamic:bos_mass:25%", "--run", "{run}", "--seq-len", "16",
             "--num-sequences", "2"],
    "evict": ["{model}", "--window", "4", "--seq-len", "16", "--num-sequences", "2"],
    "quant": ["{model}", "--bits", "4", "--seq-len", "16", "--num-sequences", "2"],
    "claims": ["{model}", "--seq-len", "16", "--num-sequences", "8"],
}  # fmt: skip
UNWRITTEN = {
    "bench": ["{model}", "--seq-len", "32", "--rounds", "1", "--batch-size", "1"],
    "check": ["{model}", "--baseline", "{baseline}"],
    "compare": ["{run}", "{model}"],
}
"""The commands that write no folder."""


@pytest.mark.slow
@pytest.mark.parametrize("command", [*COMMANDS, *UNWRITTEN])
def test_no_command_shows_a_line_of_another_library(
    command: str, told: list[str], tmp_path: Path, tiny_folder: Path
) -> None:
    """All that run a model: each goes through its own door to it."""
    import shutil

    from typer.testing import CliRunner

    from sinkscope import load_run, scan
    from sinkscope.cli import app
    from sinkscope.comparison.baseline import baseline_of, baseline_text

    places = {name: tmp_path / name for name in ("model", "run", "baseline", "step-1", "step-2")}
    for name in ("model", "step-1", "step-2"):
        shutil.copytree(tiny_folder, places[name])
    scan(str(places["model"]), seq_len=16, num_sequences=4, self_check=False).save(places["run"])
    places["baseline"].write_text(baseline_text(baseline_of(load_run(places["run"]))), "utf-8")
    told.clear()
    words = [word.format(**places) for word in (COMMANDS | UNWRITTEN)[command]]
    words += ["--out", str(tmp_path / "out")] if command in COMMANDS else []
    done = CliRunner().invoke(app, [command, *words, "--quiet"])
    assert done.exit_code == 0, (done.stderr, done.stdout)
    assert "kernel" not in done.stderr + done.stdout
    assert told == []


def test_what_the_user_set_comes_back() -> None:
    logger = logging.getLogger("transformers")
    before = logger.level
    try:
        logger.setLevel(logging.CRITICAL)
        with quiet_transformers():
            assert logger.level == logging.CRITICAL
        logger.setLevel(logging.DEBUG)
        with quiet_transformers():
            assert logger.level == logging.ERROR
        assert logger.level == logging.DEBUG
    finally:
        logger.setLevel(before)
