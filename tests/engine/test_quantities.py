"""Quantities declared outside the package are measured, saved, joined and shown like sinkscope's own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import TABLES
from declaring import declare, last_row, received
from launches import launch
from models import random_ids, tiny

import sinkscope
from sinkscope.capture import LayerView, Missing
from sinkscope.engine.collector import Part
from sinkscope.engine.record import BatchRecord
from sinkscope.engine.shards import Shard
from sinkscope.engine.tensor_parallel import HeadShards, _joined
from sinkscope.errors import SinkscopeError
from sinkscope.metrics import METRICS, quantities
from sinkscope.metrics.quantities import QUANTITIES, Quantity, quantity, quantity_set
from sinkscope.metrics.registry import head_metric, layer_metric
from sinkscope.runs.folder import UNFINISHED
from sinkscope.runs.run import Run, load_run

LENGTH, SEQUENCES = 70, 3
DECLARING = Path(__file__).parents[1] / "support" / "declaring.py"


@pytest.fixture(autouse=True)
def _own_declarations(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test declares is gone after it."""
    monkeypatch.setattr(quantities, "QUANTITIES", dict(QUANTITIES))
    for table, metrics in METRICS.items():
        monkeypatch.setitem(METRICS, table, dict(metrics))


def measure(**options: Any) -> Run:
    own = {"data": random_ids(SEQUENCES, LENGTH), "batch_size": 2, "self_check": False, **options}
    return sinkscope.scan(tiny("llama", num_hidden_layers=1), **own)


def check_declared(run: Run) -> None:
    """`received` and `last_row` against the columns that sinkscope has anyway."""
    positions = run.positions
    length = int(positions["position"].max()) + 1
    np.testing.assert_allclose(positions["received"], positions["alpha"] * (length - positions["position"]), rtol=1e-6)
    rows = positions.set_index(["layer", "head", "position"])["bos_mass"]
    curve = run.length_curve
    assert sorted(curve["length"].unique()) == [64, length]
    expected = [rows[layer, head, n - 1] for layer, head, n in zip(*(curve[k] for k in CURVE_KEYS), strict=True)]
    np.testing.assert_allclose(curve["last_row"], expected, rtol=1e-6)
    assert (curve["last_row_sem"] > 0).all()


CURVE_KEYS = ("layer", "head", "length")


def test_declared_quantities_are_columns_of_a_saved_run(tmp_path: Path) -> None:
    measure().save(tmp_path / "plain")
    declare()
    measure().save(tmp_path / "run")
    run = load_run(tmp_path / "run")
    check_declared(run)
    new = ["received", "last_row", "last_row_sem"]
    for name, table in load_run(tmp_path / "plain").tables().items():
        pd.testing.assert_frame_equal(run.tables()[name].drop(columns=new, errors="ignore"), table)
    assert run.positions.columns.tolist()[-2:] == ["received", "token"]
    assert run.manifest.conventions["received"] == "sum_i A[i,k], over all queries."
    assert run.manifest.conventions["last_row"] == "A[i,0] of the last of the first `length` queries."


class Break:
    """A progress report that breaks the scan off after its second sequence, as Ctrl-C does."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt


def break_off(folder: Path) -> None:
    with pytest.raises(sinkscope.Interrupted):
        measure(shards=folder, progress=Break())
    assert len(list((folder / UNFINISHED).iterdir())) == 2, "the key and one batch"


@pytest.mark.slow
def test_declared_quantities_survive_a_resume(tmp_path: Path) -> None:
    declare()
    measure().save(tmp_path / "whole")
    break_off(tmp_path / "run")
    measure(shards=tmp_path / "run", resume=True).save(tmp_path / "run")
    for name in TABLES:
        assert (tmp_path / "run" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    check_declared(load_run(tmp_path / "run"))


def test_a_scan_goes_on_only_with_the_same_quantities(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_off(tmp_path / "run")
    with monkeypatch.context() as inner:
        inner.setattr(quantities, "QUANTITIES", dict(quantities.QUANTITIES))
        quantity("sequence", "head", "key", unit="queries", range="[0, T]")(received)
        with pytest.raises(SinkscopeError, match=r"scan of other metrics \(received\)"):
            measure(shards=tmp_path / "run", resume=True)
    with monkeypatch.context() as inner:
        fewer = {name: metric for name, metric in METRICS["layers"].items() if name != "kurtosis_first"}
        inner.setitem(METRICS, "layers", fewer)
        with pytest.raises(SinkscopeError, match=r"scan of other metrics \(layers\.kurtosis_first\)"):
            measure(shards=tmp_path / "run", resume=True)
    assert measure(shards=tmp_path / "run", resume=True).manifest.complete, "the batch is still there"


@pytest.mark.slow
def test_declared_quantities_in_two_processes(tmp_path: Path) -> None:
    """Sequences spread over the processes, then heads: the same columns as in one process."""
    tiny("llama").save_pretrained(tmp_path / "llama")
    words = (
        "--data",
        "random",
        "--num-sequences",
        "5",
        "--seq-len",
        "70",
        "--batch-size",
        "2",
        "--quiet",
        "--epsilon",
        "0.05",
    )
    runs = []
    for name, more in (("sequences", ()), ("heads", ("--tp",))):
        code, _, err = launch(DECLARING, "scan", tmp_path / "llama", *words, *more, "--out", tmp_path / name)
        assert code == 0, err
        runs.append(load_run(tmp_path / name))
        check_declared(runs[-1])
    declare()
    asked = {"data": "random", "num_sequences": 5, "seq_len": 70, "batch_size": 2, "epsilon": 0.05}
    alone = sinkscope.scan(str(tmp_path / "llama"), **asked)
    assert alone.sinks is not None
    assert alone.sinks["head"].nunique() > 2, "of both processes"
    for run in runs:
        pd.testing.assert_frame_equal(run.positions, alone.positions, rtol=1e-5, atol=1e-6)
        pd.testing.assert_frame_equal(run.length_curve, alone.length_curve, rtol=1e-5, atol=1e-6)
        pd.testing.assert_frame_equal(run.sinks, alone.sinks, rtol=1e-5, atol=1e-6)
        pd.testing.assert_frame_equal(run.tokens, alone.tokens, rtol=1e-5, atol=1e-6)


def test_heads_of_all_processes_are_joined_along_their_axis() -> None:
    declare()
    table = Quantity("smoothing", ("sequence", "head", "metric"), lambda view: torch.zeros(0))
    own = quantity_set().extended([table])
    sizes = dict(zip((*quantities.DIMS, "stretch"), range(3, 16), strict=True)) | {"head": 4}
    dims = {each.name: each.dims for each in own.quantities if not each.of_events}
    whole = {name: torch.randn([sizes[dim] for dim in own]) for name, own in dims.items()}
    axes = {name: own.index("head") if "head" in own else None for name, own in dims.items()}
    halves = [
        {name: value if axes[name] is None else value.chunk(2, axes[name])[n] for name, value in whole.items()}
        for n in (0, 1)
    ]
    shards = [
        Shard(0, 0, 3, 3, None, {"spread": [Part(3, True, 9, 9, half)], "same": [Part(3, True, 9, 9, whole)]})
        for half in halves
    ]
    joined = HeadShards(2, frozenset({"spread"})).whole(shards, own)
    for site in ("spread", "same"):
        [part] = joined.parts[site]
        assert part.values.keys() == whole.keys()
        for name, value in whole.items():
            assert torch.equal(part.values[name], value), (site, name)


def test_events_of_all_processes_are_joined() -> None:
    """Each process counts its own heads from 0, and has every event of no head."""
    token = [0, np.nan, 5, np.nan, 1, 2, 3]
    halves = [[[0, 1, 0, 0.5, 1, 2, 3], token], [[1, 0, 7, 0.25, 1, 2, 3], token]]
    parts = [
        Part(2, True, 9, 9, {"heads": torch.zeros(2, 4, 1), "attention_sinks": torch.tensor(half)}) for half in halves
    ]
    shards = [Shard(0, 0, 2, 2, None, {"spread": [part]}) for part in parts]
    [joined] = HeadShards(2, frozenset({"spread"})).whole(shards, quantity_set()).parts["spread"]
    expected = torch.tensor([token, halves[0][0], [1, 4, 7, 0.25, 1, 2, 3]])
    torch.testing.assert_close(joined.values["attention_sinks"], expected, equal_nan=True)


def test_the_sequences_of_events_count_in_their_domain() -> None:
    record = BatchRecord(quantity_set())
    heads = {"heads": torch.zeros(2, 4, 1)}
    events = {"attention_sinks": torch.tensor([[1.0, 3, 0, 0.5, 1, 2, 3]])}
    for start, more in ((4, events), (0, events), (2, {})):
        record.keep(start, 2, {"site": [Part(2, True, 64, 64, heads | more)]})
    np.testing.assert_array_equal(record.values()["site"].events["attention"][:, 0], [1, 5])


def test_a_batch_that_lacks_a_quantity_leaves_its_sequences_empty() -> None:
    own = quantity_set()
    each = torch.arange(2.0)
    there = {"first_unit": torch.ones(2, 3), "early_alpha": torch.stack([each, each])[None], "heads": torch.zeros(2, 1)}
    record = BatchRecord(own)
    record.keep(0, 2, {"site": [Part(2, True, 64, 64, there)]})
    record.keep(2, 1, {"site": [Part(1, True, 32, 32, {"heads": torch.zeros(1, 1)})]})
    values = record.values()["site"]
    assert values.first_unit is not None
    np.testing.assert_array_equal(values.first_unit, [[1.0] * 3, [1.0] * 3, [np.nan] * 3])
    np.testing.assert_array_equal(values.arrays["early_alpha"], [[0.0, 0.5], [0.0, 0.5]])
    assert values.count == 3
    assert "alpha" not in values.arrays


def test_an_axis_of_two_sizes_is_named() -> None:
    record = BatchRecord(quantity_set())
    for start, channels in enumerate((3, 4)):
        record.keep(start, 1, {"site": [Part(1, True, 64, 64, {"first_unit": torch.ones(1, channels)})]})
    with pytest.raises(SinkscopeError, match=r"first_unit: its axes \(channel\) have \[3\] in one batch and \[4\]"):
        record.values()


def test_sequences_shorter_than_a_length_are_left_out_there() -> None:
    """Also in sink_rate: they do not count as sequences without a sink."""
    ids = random_ids(3, LENGTH)
    mask = torch.ones_like(ids)
    mask[1:, 66:] = 0
    run = measure(data={"input_ids": ids, "attention_mask": mask}, epsilon=1e-9)
    assert (run.length_curve["sink_rate"] == 1).all()
    at_the_end = run.length_curve[run.length_curve["length"] == LENGTH]
    assert at_the_end["sink_rate_sem"].isna().all(), "one sequence has no standard error"


def test_a_missing_quantity_is_an_empty_column() -> None:
    @quantity("sequence", "head", "key", unit="ratio", range="[0, 1]")
    def unseen(view: LayerView) -> torch.Tensor:
        """Never there."""
        raise Missing

    @quantity("sequence", "head", "query", unit="ratio", range="[0, 1]", internal=True)
    def hidden(view: LayerView) -> torch.Tensor:
        """A[i,0]."""
        return view.attention.first

    run = measure()
    assert run.positions["unseen"].isna().all()
    assert "hidden" not in run.positions


def test_a_quantity_that_fails_is_named() -> None:
    @quantity("sequence", "head", "key", unit="ratio", range="[0, 1]")
    def breaks(view: LayerView) -> torch.Tensor:
        """Never there."""
        raise ValueError("boom")

    with pytest.raises(SinkscopeError, match=r"^quantity breaks of test_quantities: boom$"):
        measure()


def test_wrong_axes_are_named() -> None:
    @quantity("sequence", "head", "key", unit="ratio", range="[0, 1]")
    def flat(view: LayerView) -> torch.Tensor:
        """A[i,0], but of all heads alike."""
        return view.attention.first[:, 0]

    shapes = r"quantity flat: .* shape \[2, 70\]; its axes \(sequence, head, key\) need \[2, 4, 70\]"
    with pytest.raises(SinkscopeError, match=shapes):
        measure()


@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((), "at least one is needed"),
        (("sequence", "heads"), "each one of sequence, head"),
        (("head", "key"), "the first must be sequence, element or event"),
        (("event", "head"), "event and field stand together and alone"),
        (("sequence", "key", "channel"), "can only be last"),
        (("sequence", "head", "metric"), "metric is for the tables"),
    ],
)
def test_axes_that_cannot_be_joined_are_refused(dims: tuple[str, ...], said: str) -> None:
    with pytest.raises(SinkscopeError, match=said):
        quantity(*dims, unit="ratio", range="[0, 1]")


def test_names_and_columns_that_are_taken_are_refused() -> None:
    declare()
    with pytest.raises(SinkscopeError, match="'received' is declared already"):
        declare()
    for column in ("alpha", "token"):
        with pytest.raises(SinkscopeError, match=f"positions has a column '{column}' already"):
            quantity("sequence", "head", "key", unit="", range="", column=column)(rows)
    quantity("sequence", "head", "length", unit="", range="", column="alpha")(last_row_again)


def rows(view: LayerView) -> torch.Tensor:
    """Nothing of use."""
    return received(view)


def last_row_again(view: LayerView, length: int) -> torch.Tensor:
    """last_row."""
    return last_row(view, length)


@pytest.mark.slow
def test_a_metric_declared_after_a_scan_is_measured_by_the_next() -> None:
    """The names of the columns were once fixed by the first scan of the process: later ones were dropped."""
    before = measure()

    @head_metric(unit="probability", range="[0, 1]")
    def twice(view: LayerView) -> torch.Tensor:
        """2 A[0,0]."""
        return 2 * view.attention.first[..., 0]

    after = measure(metrics=[twice])
    pd.testing.assert_frame_equal(measure().heads, before.heads)
    assert (after.heads["twice"] == 2).all()
    assert (after.sequences["twice"].dropna() == 2).all()
    assert (after.layers["mean_twice"] == 2).all()


@pytest.mark.parametrize("batch_size", [1, 3])
def test_a_sampled_metric_of_a_user_s_own(batch_size: int) -> None:
    """Plain functions of a view: the same numbers as unsampled, on the first sequences alone."""

    @layer_metric(unit="-", range="-")
    def spread_out(view: LayerView) -> torch.Tensor:
        """Whatever a view holds, of the attention and of the residual stream."""
        return view.attention.entropy.mean((1, 2)) * view.value_norms.sum((1, 2)) + view.x.std((1, 2))

    @layer_metric(unit="-", range="-", sampled=True)
    def sampled(view: LayerView) -> torch.Tensor:
        """The same, on the first sequences."""
        return spread_out(view)

    run = measure(spectra=2, batch_size=batch_size, metrics=[spread_out, sampled])
    rows = run.sequences[run.sequences["head"].isna()]
    first = rows["sequence"] < 2
    np.testing.assert_allclose(rows.loc[first, "sampled"], rows.loc[first, "spread_out"], rtol=1e-6)
    assert rows.loc[~first, "sampled"].isna().all()
    assert rows["spread_out"].notna().all()


def test_heads_that_see_every_key_join_heads_that_do_not() -> None:
    """Under --tp a process may hold the heads that leave no key out."""
    alpha = torch.rand(1, 2, 5)
    some = torch.tensor([[[0.0, 1, 0, 0, 2]] * 2])
    whole, picking = (
        Part(2, True, 5, 5, {"heads": torch.zeros(2, 2, 1), "alpha": alpha} | more)
        for more in ({}, {"unseen_keys": some})
    )
    for parts in ((whole, picking), (picking, whole)):
        found = _joined(parts, quantity_set()).values["unseen_keys"]
        assert found.shape == (1, 4, 5)
        assert found.sum() == some.sum()
