"""The kernels' work and its predicted time, against closed forms."""

from __future__ import annotations

from pathlib import Path

import pytest
import roofline
import torch
from roofline import PEAKS, Layer, Peak, Work, predicted, seconds, work

PAGE = (Path(__file__).parents[2] / "docs" / "speed.md").read_text("utf-8")


def test_the_work_of_a_call_that_can_be_counted() -> None:
    """Three tokens: 1 + 2 + 3 pairs in each of two heads; a product of width 4 has four multiplications and additions.
    Queries and output have 2 x 3 x 4 numbers of two bytes, keys and values 1 x 3 x 4."""
    done = work(Layer(heads=2, groups=1, width=4, tokens=3, bytes=2))
    pairs = sum(1 for query in range(3) for key in range(3) if key <= query) * 2
    assert pairs == 12
    assert done["flash"] == Work(pairs * 16, 0, 48 + 24 + 24 + 48 + 24)
    assert done["row_sums"] == Work(pairs * 16, pairs * 10, 48 + 24 + 24 + 48 + 10 * 24)
    assert done["column_sums"] == Work(pairs * 8, pairs * 8, 48 + 24 + 4 * 24)


def test_seconds_are_those_of_the_operations_or_of_the_bytes() -> None:
    peak = Peak(bfloat16=100.0, float32=10.0, memory=5.0, flash=0.5)
    assert seconds(Work(200, 20, 1), peak, "bfloat16") == 200 / 50 + 20 / 5
    assert seconds(Work(200, 20, 1), peak, "float32") == 200 / 10 + 20 / 5
    assert seconds(Work(1, 0, 100), peak, "bfloat16") == 20.0


def test_flash_attention_s_time_is_its_published_rate() -> None:
    times = predicted(Layer(32, 8, 128, 8192, 2), "NVIDIA H100 80GB HBM3", "bfloat16")
    assert times["flash"] == pytest.approx(4 * 128 * 32 * 8192 * 8193 / 2 / (0.35 * 989e12))
    assert set(times) == {"flash", "row_sums", "column_sums"}
    assert predicted(Layer(32, 8, 128, 8192, 2), "another", "bfloat16") == {}


def test_the_table_stands_in_the_page() -> None:
    assert roofline.table() in PAGE, "python tests/gpu/roofline.py prints it"


def test_prediction_and_measurement_stand_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "measured", lambda call: {"row_sums": 0.5, "flash": 0.1})
    monkeypatch.setitem(PEAKS, "", Peak(1e6, 1e6, 1e6, 0.5))
    figures, passed = roofline.roofline("llama3-8b", "bfloat16", 64, "cpu", True)
    assert passed
    expected = predicted(Layer(4, 2, 16, 64, 2), "", "bfloat16")["row_sums"]
    assert figures["row_sums ms"] == 500
    assert figures["row_sums predicted ms"] == expected * 1e3
    assert figures["row_sums ratio"] == 0.5 / expected


def test_torch_s_attention_is_measured_where_no_kernel_runs() -> None:
    figures, passed = roofline.roofline("llama3-8b", "float32", 64, "cpu", True)
    assert passed
    assert figures["flash ms"] > 0
    assert "row_sums ms" not in figures or torch.cuda.is_available()
