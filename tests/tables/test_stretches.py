"""Long sequences: positions from `stretches.EVERY` on are kept in stretches, and every other number stays as it is."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import random_ids, tiny

import sinkscope
from sinkscope.engine.collector import Part
from sinkscope.engine.record import BatchRecord
from sinkscope.metrics import stretches
from sinkscope.metrics.quantities import quantity_set
from sinkscope.present.html.head_data import head_data
from sinkscope.runs.run import Run, load_run

LENGTH, EVERY = 150, 32
KEYS = ["layer", "head", "position"]


def scan(data: Any, **options: Any) -> Run:
    model = tiny("llama", num_hidden_layers=1)
    return sinkscope.scan(model, data=data, self_check=False, **{"batch_size": 2, **options})


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return random_ids(3, LENGTH)


@pytest.fixture(scope="module")
def whole(ids: torch.Tensor) -> Run:
    """Every position one by one."""
    return scan(ids)


@pytest.fixture(scope="module")
def alone(ids: torch.Tensor) -> list[pd.DataFrame]:
    """positions.parquet of each sequence by itself, every position one by one."""
    return [scan(one[None]).positions.set_index(KEYS) for one in ids]


def shorten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stretches, "EVERY", EVERY)
    patch.setattr(stretches, "STRETCHES", 4)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch)


@pytest.fixture(scope="module")
def run(ids: torch.Tensor) -> Run:
    """The same sequences, in stretches from EVERY on."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        return scan(ids)


@pytest.mark.usefixtures("short")
def test_edges_lie_evenly_between_a_position_and_its_double() -> None:
    assert stretches.edges(EVERY) == [EVERY]
    assert stretches.edges(EVERY + 1) == [32, 33]
    assert stretches.edges(LENGTH) == [32, 40, 48, 56, 64, 80, 96, 112, 128, 150]


def test_a_stretch_is_short_beside_its_position_and_there_are_few() -> None:
    bounds = stretches.edges(131_072)
    assert len(bounds) == 5 * 64 + 1
    assert all((after - first) * 64 <= first for first, after in itertools.pairwise(bounds))


@pytest.mark.usefixtures("short")
def test_stretches_sum_up_what_every_position_has(run: Run, whole: Run) -> None:
    assert run.stretches is not None
    pd.testing.assert_frame_equal(
        run.positions, whole.positions[whole.positions["position"] < EVERY].reset_index(drop=True), rtol=1e-6
    )
    assert run.stretches["first"].unique().tolist() == stretches.edges(LENGTH)[:-1]
    for column in ("alpha", "bos_mass", "bos_share"):
        values = whole.positions.set_index(KEYS)[column]
        for row in run.stretches.itertuples():
            inside = [values[row.layer, row.head, place] for place in range(row.first, row.last + 1)]
            assert getattr(row, column) == pytest.approx(np.mean(inside), rel=1e-6)


@pytest.mark.slow
def test_the_largest_value_of_one_sequence_keeps_its_position(run: Run, alone: list[pd.DataFrame]) -> None:
    assert run.stretches is not None
    for column in ("alpha", "bos_mass"):
        for row in run.stretches.iloc[::5].itertuples():
            places = range(row.first, row.last + 1)
            values = np.array([[each[column][row.layer, row.head, k] for k in places] for each in alone])
            assert getattr(row, f"{column}_max") == pytest.approx(values.max(), rel=1e-5)
            assert getattr(row, f"{column}_max_position") == row.first + values.max(0).argmax()


@pytest.mark.slow
def test_all_other_tables_stay_as_they_are(run: Run, whole: Run, tmp_path: Path) -> None:
    """Also peak_position and the summary's top positions, which are read from every position."""
    run.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    assert {*loaded.tables()} - {*whole.tables()} == {"stretches"}
    for name, table in loaded.tables().items():
        if name not in ("positions", "stretches"):
            pd.testing.assert_frame_equal(table, whole.tables()[name], rtol=1e-6)
    assert [place.position for place in run.summary.streams["text"].top_positions] == [
        place.position for place in whole.summary.streams["text"].top_positions
    ]
    pd.testing.assert_frame_equal(loaded.stretches, run.stretches)


@pytest.mark.usefixtures("short")
def test_a_sequence_that_ends_in_a_stretch_counts_where_it_is(ids: torch.Tensor, alone: list[pd.DataFrame]) -> None:
    """The first sequence has 150 tokens, the others 70: they end in the stretch of 64 to 79."""
    mask = torch.ones_like(ids)
    mask[1:, 70:] = 0
    uneven = scan({"input_ids": ids, "attention_mask": mask})
    assert uneven.stretches is not None
    rows = uneven.stretches[uneven.stretches["head"] == 0].set_index("first")["bos_mass"]
    rows_of = [each["bos_mass"][0, 0].to_numpy() for each in alone]  # causal: the same in a shorter sequence
    there = [*rows_of[0][64:80], *rows_of[1][64:70], *rows_of[2][64:70]]
    assert rows[64] == pytest.approx(np.mean(there), rel=1e-5)
    assert rows[80] == pytest.approx(rows_of[0][80:96].mean(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.usefixtures("short")
def test_a_resumed_scan_has_the_same_stretches(ids: torch.Tensor, tmp_path: Path) -> None:
    scan(ids).save(tmp_path / "whole")

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(sinkscope.Interrupted):
        scan(ids, shards=tmp_path / "run", progress=stop)
    scan(ids, shards=tmp_path / "run", resume=True).save(tmp_path / "run")
    for name in ("positions.parquet", "stretches.parquet", "heads.csv"):
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.usefixtures("short")
def test_a_value_that_is_missing_counts_nowhere() -> None:
    values = torch.full((1, 1, 64), torch.nan)
    values[..., 41] = 0.25
    [[rows]] = stretches.stretched(values).tolist()
    assert rows[1] == [0.25, 1, 0.25, 41]
    assert rows[0][:2] == [0, 0]
    assert np.isnan(rows[0][2:]).all()


def test_the_report_draws_a_peak_beyond_the_positions(run: Run) -> None:
    assert run.stretches is not None
    beyond = run.stretches.copy()
    peak = (beyond["head"] == 0) & (beyond["first"] == 112)
    beyond.loc[peak, ["alpha_max", "alpha_max_position"]] = [0.875, 117]
    head = head_data(replace(run, stretches=beyond))["curves"][0]
    assert dict(zip(head["positions"], head["alpha"], strict=True))[117] == 0.875


def test_batches_are_not_kept_for_a_mean() -> None:
    """The memory of a scan must not grow by every position of every head with each batch."""
    record = BatchRecord(quantity_set())
    for start in (1, 0, 2):
        sums = torch.full((1, 4, 64), float(start), dtype=torch.float64)
        record.keep(start, 1, {"site": [Part(1, True, 64, 64, {"alpha": sums, "heads": torch.zeros(1, 4, 1)})]})
    assert record.count == 3
    held = [part.values for _, parts in record._done.values() for own in parts.values() for part in own]
    assert [*map(list, held)] == [["heads"]] * 3
    np.testing.assert_array_equal(record.values()["site"].alpha, np.ones((4, 64)))
