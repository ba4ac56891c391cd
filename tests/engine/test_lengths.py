"""`--lengths`: prefixes of one pass against runs at those lengths; cosines of prefixes; what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from models import random_ids, tiny
from typer.testing import CliRunner

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.cli import app
from sinkscope.questions.cosines.columns import COSINES
from sinkscope.runs.request import make_request

LENGTHS = (5, 12)
COLUMNS = ("bos_mass", "sink_score", "sink_rate")


def test_each_prefix_of_one_pass_is_a_run_at_that_length() -> None:
    ids = random_ids(3, 20)
    run = sinkscope.scan(
        tiny("llama", num_hidden_layers=2), data=ids, lengths=[12, 5], measure="cosines", self_check=False
    )
    assert list(run.length_curve["length"].unique()) == [*LENGTHS, 20]
    assert list(run.measured["cosine_curve"]["length"].unique()) == [*LENGTHS, 20]
    for length in (*LENGTHS, 20):
        short = sinkscope.scan(tiny("llama", num_hidden_layers=2), data=ids[:, :length], self_check=False)
        for table, own, names in (
            (run.length_curve, short.heads, COLUMNS),
            (run.measured["cosine_curve"], short.layers, tuple(COSINES)),
        ):
            found = table[table["length"] == length]
            for name in (*names, *(f"{name}_sem" for name in names)):
                np.testing.assert_allclose(found[name].to_numpy(), own[name].to_numpy(), atol=2e-6, err_msg=name)


def test_lengths_are_put_in_order_and_once() -> None:
    asked = make_request(model="m", lengths=[64, 16, 64])
    assert asked.lengths == (16, 64)
    assert asked.of_model("other").lengths == (16, 64)
    assert make_request(model="m").lengths is None


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ("64,many", "write numbers of tokens"),
        ("1,8", "at least 2 tokens"),
        ("64", "the longest sequence has 16 tokens"),
    ],
)
def test_lengths_that_cannot_be_are_refused(lengths: str, message: str, tmp_path: Path) -> None:
    arguments = ["scan", "example:trigger-softmax", "--num-sequences", "2", "--lengths", lengths]
    refused = CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "run")])
    assert refused.exit_code == 2
    assert message in refused.stderr
    assert not (tmp_path / "run").exists()


def test_python_refuses_them_too() -> None:
    with pytest.raises(SinkscopeError, match="--lengths 99"):
        sinkscope.scan(tiny("llama"), data=random_ids(1, 8), lengths=[99], self_check=False)
