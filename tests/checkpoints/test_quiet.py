"""Nothing that transformers or a quantisation's library logs while a model is loaded or run reaches stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
from conftest import Scan, make_model, make_tokenizer
from transformers import LlamaModel
from transformers.utils import logging as theirs

from sinkscope.checkpoints.quiet import LOUD, quiet_transformers


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


@pytest.mark.parametrize("more", [(), ("--generate", 2)])
def test_a_scan_shows_no_line_of_another_library(
    more: tuple[object, ...], told: list[str], tmp_path: Path, scan_cli: Scan
) -> None:
    make_model().save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    outcome = scan_cli(tmp_path / "model", "--quiet", *more)
    assert outcome.code == 0, outcome.stderr
    assert outcome.stderr == ""
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
