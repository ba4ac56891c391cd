"""The frame for measurements on request: what names they have, and that one of any shape needs no change elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Refused, Scan
from families import tiny_model
from models import random_ids, tiny
from tiers import slow_but
from transformers import AutoModel, AutoModelForMaskedLM
from typer.testing import CliRunner
from watched import hooks

import sinkscope
from sinkscope.cli import app
from sinkscope.engine import measurement as measuring
from sinkscope.engine.collector import Part, Parts
from sinkscope.engine.measurement import Findings, Measurement, begun, left_out_words, measurements, refuse_spread
from sinkscope.errors import SinkscopeError
from sinkscope.inputs.batches import Batch
from sinkscope.metrics import registered
from sinkscope.metrics.quantities import Quantity
from sinkscope.questions.smoothing.measure import Smoothing
from sinkscope.runs.questions import QUESTIONS, questions_asked, tables_of_questions
from sinkscope.runs.request import make_request
from sinkscope.runs.schema.manifest import Manifest


class Echo(Measurement):
    """Watches what a scan has no quantity for: the largest input of each MLP, for each sequence."""

    name = "echo"

    def quantities(self) -> tuple[Quantity, ...]:
        return (Quantity("echo", ("sequence",), lambda view: view.x_peaks.amax(-1)), Quantity("mlp", ("sequence",), no))

    @contextmanager
    def watching(self, batch: Batch, ids: np.ndarray) -> Iterator[None]:
        assert ids.shape == batch.inputs.shape
        self.seen: dict[str, torch.Tensor] = {}
        handles = [
            module.register_forward_pre_hook(self._keep(name))
            for name, module in self.subject.model.named_modules()
            if name.endswith("mlp")
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _keep(self, name: str) -> Any:
        def hook(module: Any, args: tuple[torch.Tensor, ...]) -> None:
            self.seen[name] = args[0].abs().amax((1, 2))

        return hook

    def parts(self) -> Parts:
        return {name: [Part(len(seen), True, 0, 0, {"mlp": seen.cpu()})] for name, seen in self.seen.items()}

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        [domain] = findings.domains
        rows = [
            {"module": name, "sequence": number, "largest": value}
            for name, values in domain.others.items()
            for number, value in enumerate(values.arrays["mlp"])
        ]
        return {"echo": pd.DataFrame(rows)}

    def summarise(self, streams: dict[str, Any], tables: dict[str, pd.DataFrame]) -> None:
        streams["text"].measured["echo"] = {"modules": tables["echo"]["module"].nunique()}


def no(view: Any) -> torch.Tensor:
    raise sinkscope.Missing


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measurements", lambda names: [Echo])


@pytest.mark.usefixtures("echo")
def test_what_a_measurement_watches_besides_layers_is_joined_over_batches(tmp_path: Path) -> None:
    model, ids = tiny("llama"), random_ids(5, 20)
    run = sinkscope.scan(model, data=ids, batch_size=2, self_check=False, shards=tmp_path / "run")
    found = run.measured["echo"]
    assert found["module"].unique().tolist() == [f"layers.{n}.mlp" for n in range(3)]
    whole = sinkscope.scan(model, data=ids, batch_size=5, self_check=False).measured["echo"]
    assert found["largest"].to_numpy() == pytest.approx(whole["largest"].to_numpy(), rel=1e-5)
    assert found["largest"].nunique() == 15
    assert run.summary.streams["text"].measured == {"echo": {"modules": 3}}
    assert hooks(model) == 0


class Count(Measurement):
    """Has neither quantities nor hooks: its table is made of what every scan finds."""

    name = "count"

    def tables(self, findings: Findings) -> dict[str, pd.DataFrame]:
        return {"count": findings.heads.groupby("layer", as_index=False).size()}

    def summarise(self, streams: dict[str, Any], tables: dict[str, pd.DataFrame]) -> None:
        streams["text"].measured["count"] = {"heads": int(tables["count"]["size"].sum())}


def test_a_measurement_may_read_the_tables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "measurements", lambda names: [Count])
    run = sinkscope.scan(tiny("llama"), data=random_ids(2, 20), self_check=False)
    assert run.measured["count"]["size"].tolist() == [4, 4, 4]
    assert run.summary.streams["text"].measured == {"count": {"heads": 12}}


@pytest.mark.slow
@pytest.mark.usefixtures("echo")
def test_a_scan_resumes_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), random_ids(4, 20)
    keep, left = Echo.parts, [2]

    def dying(self: Echo) -> Parts:
        left[0] -= 1
        if left[0] < 0:
            raise SinkscopeError("stop")
        return keep(self)

    options: dict[str, Any] = {"data": ids, "batch_size": 1, "self_check": False, "shards": tmp_path / "run"}
    with monkeypatch.context() as inner:
        inner.setattr(Echo, "parts", dying)
        with pytest.raises(SinkscopeError, match="stop"):
            sinkscope.scan(model, **options)
    assert hooks(model) == 0
    resumed = sinkscope.scan(model, resume=True, **options).measured["echo"]
    alone = sinkscope.scan(model, data=ids, batch_size=1, self_check=False).measured["echo"]
    pd.testing.assert_frame_equal(resumed, alone)


def test_every_measurement_has_its_module_and_its_tables() -> None:
    for name, question in QUESTIONS.items():
        [kind] = measurements([name])
        assert kind.name == question.name == name
        assert question.tables
        assert question.asks.endswith("?")
    for table, columns in registered().tables.items():
        asked = {metric.measure for metric in columns.values()} - {None}
        assert asked <= {*QUESTIONS}
        assert table in ("heads", "layers") or table in tables_of_questions()


def test_a_plain_scan_has_no_column_of_a_measurement() -> None:
    plain, whole = registered().asked(()), registered()
    assert set(plain.tables) == {"heads", "layers"}
    for table in plain.tables:
        missing = set(whole.names(table)) - set(plain.names(table))
        assert all(whole.tables[table][name].measure for name in missing)


def test_names_come_in_one_order_and_all_is_every_one() -> None:
    assert questions_asked("all") == questions_asked([*reversed(list(QUESTIONS)), "all", "all"]) == tuple(QUESTIONS)
    assert questions_asked(()) == ()
    assert make_request(model="m", measures=[*reversed(list(QUESTIONS))]).measures == tuple(QUESTIONS)
    with pytest.raises(SinkscopeError, match=r"^--measure 'smooth': .*all; did you mean smoothing\?$"):
        make_request(model="m", measures=["smooth"])


@pytest.mark.slow
def test_the_older_spelling_means_the_same(tiny_folder: Path, scan_cli: Scan) -> None:
    asked = []
    for number, words in enumerate((["--smoothing"], ["--measure", "smoothing"], ["--measure", "smoothing"] * 2)):
        outcome = scan_cli(tiny_folder, *words, "--no-self-check", "--num-sequences", 1, name=f"run{number}")
        assert outcome.code == 0, outcome.stderr
        asked.append(Manifest.model_validate(outcome.json("manifest")).request.measures)
        assert (outcome.folder / "smoothing.csv").read_bytes() == (
            outcome.folder.with_name("run0") / "smoothing.csv"
        ).read_bytes()
    assert asked == [("smoothing",)] * 3
    text = CliRunner().invoke(app, ["scan", "--help"]).stdout
    assert "--smoothing" not in text
    assert re.search(r"--measure +NAME", text)
    assert all(name in text for name in QUESTIONS)


def test_what_pictures_do_not_allow_is_left_out_where_all_is_asked(tmp_path: Path) -> None:
    """A resumed scan finds the same run; a question that is named is refused as ever."""
    read: dict[str, Any] = {"data": {"pixel_values": torch.randn(2, 3, 32, 32)}, "self_check": False}
    model = tiny_model(AutoModel, "vit")
    run = sinkscope.scan(model, measure="all", shards=tmp_path / "run", **read)
    named = tuple(name for name in QUESTIONS if name not in ("smoothing", "spikes"))
    assert run.manifest.request.measures == named
    assert {*run.measured} == {table.name for name in named for table in QUESTIONS[name].tables}
    why = "the parts of a layer are found in a pass over token ids, but ViTModel reads pixel_values"
    told = [warning for warning in run.summary.warnings if "--measure all" in warning]
    assert told == [f"--measure all leaves out smoothing, spikes: {why}"]
    run.save(tmp_path / "run")
    again = sinkscope.scan(model, measure="all", shards=tmp_path / "run", resume=True, **read)
    assert again.manifest.created == run.manifest.created
    with pytest.raises(SinkscopeError, match=f"^--measure smoothing: {why}$"):
        sinkscope.scan(model, measure=["all", "smoothing"], **read)


def test_only_what_all_alone_asks_is_optional() -> None:
    assert make_request(model="m", measures="all").optional == {*QUESTIONS}
    assert make_request(model="m", measures=["all", "switch"]).optional == {*QUESTIONS} - {"switch"}
    asked = make_request(model="m", measures=["all"], data=["prose"], first=["bos", "none"])
    assert asked.optional == {*QUESTIONS} - {"first"}
    assert asked.model_copy(update={"measures": ("first",)}).optional == asked.optional
    assert make_request(model="m", measures=["switch"]).optional == frozenset()
    assert (
        asked.as_dict()
        == make_request(model="m", measures=[*QUESTIONS], data=["prose"], first=["bos", "none"]).as_dict()
    )


def test_what_spread_heads_do_not_allow_is_left_out_where_all_is_asked() -> None:
    subject: Any = SimpleNamespace(request=make_request(model="m", measures=["all", "streaming"]))
    found, told = begun(["smoothing", "streaming"], subject, tensor=True)
    assert [measurement.name for measurement in found] == ["streaming"]
    assert told == {"smoothing": "finding W_V takes the whole of it, and no process holds it all"}
    assert left_out_words({"a": "why", "b": "other", "c": "why"}) == [
        "--measure all leaves out a, c: why", "--measure all leaves out b: other"
    ]  # fmt: skip
    subject.request = make_request(model="m", measures=["all", "smoothing"])
    with pytest.raises(SinkscopeError, match=r"^--tp with --measure smoothing: finding W_V"):
        begun(["smoothing"], subject, tensor=True)


def test_an_unknown_measurement_is_refused_before_anything_is_loaded(refused: Refused, tiny_folder: Path) -> None:
    assert refused(tiny_folder, "--measure", "nonesuch").startswith("--measure 'nonesuch': choose one of smoothing")


def test_spread_heads_are_refused_where_a_measurement_reads_weights() -> None:
    with pytest.raises(SinkscopeError, match=r"--tp with --measure smoothing: .* no process holds it all"):
        refuse_spread([Echo, Smoothing])
    refuse_spread([Echo])


@pytest.mark.parametrize("name", slow_but(["smoothing", "spikes"], "spikes"))
def test_a_model_that_cannot_be_run_on_short_sequences_is_refused_in_one_line(name: str) -> None:
    """Funnel pools four tokens to one, and its relative positions then fit no longer."""
    model = tiny_model(AutoModelForMaskedLM, "funnel")
    with pytest.raises(
        SinkscopeError, match=f"--measure {name}: FunnelModel cannot be run on 16 sequences of 4 tokens"
    ):
        sinkscope.scan(model, data=random_ids(2, 40), measure=name)
