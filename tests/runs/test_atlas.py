"""Many runs side by side, and the published numbers that may stand beside them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from desk import scanned
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.errors import SinkscopeError
from sinkscope.runs.atlas import atlas, atlas_table, run_names
from sinkscope.runs.catalogue import table_columns
from sinkscope.runs.papers import Setting, numbers_of, published_numbers
from sinkscope.runs.run import Run, load_run
from sinkscope.runs.schema.other_tables import ATLAS_TABLE

LLAMA = "meta-llama/Llama-2-7b-hf"
COLUMNS = [column.name for column in table_columns(ATLAS_TABLE)]


def named(model: str, kind: str = "prose", tokens: int = 256) -> Run:
    """A run that says it is of another model, text and length."""
    run = scanned()
    run.manifest.model.id = model
    run.manifest.data[0].spec, run.manifest.data[0].bos = kind, "auto"
    run.summary.streams["text"].tokens_per_sequence = tokens
    return run


def row(run: Run) -> dict[str, Any]:
    table = atlas_table(atlas([run]))
    assert len(table) == 1
    return dict(table.iloc[0])


def test_a_row_holds_the_numbers_of_the_run() -> None:
    run = scanned()
    found, stream = row(run), run.summary.streams["text"]
    assert list(found) == COLUMNS
    assert found["sink_rate"] == stream.sink_rate_percent["0.3"].T
    assert found["alpha_0"] == stream.sink_score.mean
    assert (found["bos_mass"], found["bos_mass_sem"]) == (stream.bos_mass.mean, stream.bos_mass.sem)
    assert found["heads_over_half"] == (run.heads["bos_mass"] > 0.5).mean()
    assert found["inf_norm_peak"] == run.layers.loc[run.layers["layer"] > 0, "inf_norm"].max()
    assert (found["tokens"], found["sequences"], found["heads"], found["layers"]) == (48, 8, 12, 3)
    assert found["attention"] == "softmax"
    for name in ("sink_rate_64", "switch_phi", "position_or_token", "super_weights", "published"):
        assert pd.isna(found[name]), f"{name} was not measured"


def test_a_row_tells_the_shortest_sequence_from_the_longest() -> None:
    run = scanned()
    assert (row(run)["shortest"], row(run)["tokens"]) == (48, 48)
    run.manifest.data[0].shortest = 20
    assert (row(run)["shortest"], row(run)["tokens"]) == (20, 48)
    assert atlas([run])[0].lengths == "20 to 48"
    run.summary.streams["text"].tokens_per_sequence = 60  # a stream that the model makes of them
    assert pd.isna(row(run)["shortest"])
    assert atlas([run])[0].lengths == "? to 60"


def test_an_atlas_of_no_runs_is_refused() -> None:
    with pytest.raises(SinkscopeError, match=r"^an atlas needs at least one run$"):
        atlas([])


def test_a_rate_that_says_nothing_is_missing() -> None:
    run = scanned()
    run.summary.streams["text"].uniform_alpha_0.T = 0.31
    found = row(run)
    assert np.isnan(found["sink_rate"])
    assert found["sink_rate_0.8"] == run.summary.streams["text"].sink_rate_percent["0.8"].T


def test_masses_of_attention_without_softmax_are_missing() -> None:
    run = scanned()
    run.manifest.attention[1].score = "relu"
    found = row(run)
    assert found["attention"] == "relu, softmax"
    assert all(np.isnan(found[name]) for name in ("sink_rate", "alpha_0", "bos_mass", "heads_over_half"))
    assert found["heads"] == 12


def test_measurements_on_request_are_shown() -> None:
    run = scanned()
    keys = {"stream": "text", "layer": [0, 1], "head": 0}
    run.measured["switch"] = pd.DataFrame(keys | {"switch_phi": [0.5, np.nan]})
    parts = {"channel": [3, 3], "neuron": [7, 9], "super_weight": pd.array([True, None], dtype="boolean")}
    run.measured["spikes"] = pd.DataFrame(keys | parts)
    counts = {"token": 3, "position": 1, "both": 0, "none": 0}
    run.summary.streams["text"].measured["first"] = {
        "heads": 12, "missing": 0, "sinks_on_bos": 4, "of_sinks_on_bos": counts
    }  # fmt: skip
    found = row(run)
    assert (found["switch_phi"], found["super_weights"]) == (0.5, "0.3.7")
    assert found["position_or_token"] == "token (3 of 4)"


def test_every_domain_has_its_row(tmp_path: Path) -> None:
    run = load_run(Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos")
    table = atlas_table(atlas([run, scanned()]))
    assert table["text"].tolist()[:2] == run.summary.data
    assert table["run"].tolist() == ["two-bos", "two-bos", "run 2"]
    rates = [entry.streams["text"].sink_rate_percent["0.3"].T for entry in run.summary.domains.values()]
    assert table["sink_rate"].tolist()[:2] == rates


def test_runs_of_one_name_are_told_apart() -> None:
    first, second, third = (scanned() for _ in range(3))
    first.path, second.path, third.path = Path("/a/x/run"), Path("/b/x/run"), Path("/b/other")
    assert run_names([first, second, third]) == ["a/x/run", "b/x/run", "other"]


# Published numbers


def test_every_published_number_says_what_it_may_stand_beside() -> None:
    for each in published_numbers():
        number = each.number
        assert all((number.model, number.metric, number.unit, number.text, number.setting, number.source)), each
        assert np.isfinite(number.value), each
        assert bool(each.beside) != bool(each.why), each
        assert each.beside in {"", *COLUMNS}, each
        assert number.not_comparable == (each.why or None)
        assert each.why or each.kind == "any" or (each.tokens and each.kind), each
        assert each.ids
        assert all(re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) for name in each.ids), "no run can have another id"


NATURAL = Setting(tokens=256, shortest=256, kind="natural", bos=True, opening="auto", dtype="bfloat16")


def published(run: Setting, metric: str, text: str | None = None) -> dict[float, str]:
    """Of each published number of a metric: why it cannot be held against the run."""
    rows = [each for each in numbers_of(LLAMA.lower()) if each.number.metric == metric]
    return {each.number.value: each.difference(run) for each in rows if text in (None, each.number.text)}


def changed(**other: Any) -> Setting:
    return Setting(**(vars(NATURAL) | other))


@pytest.mark.parametrize(
    ("run", "metric", "found"),
    [
        (NATURAL, "sink_rate", {92.47: ""}),
        (changed(tokens=64, shortest=64), "sink_rate", {92.47: ""}),
        (changed(tokens=48, shortest=48), "sink_rate", {92.47: "measured at T = 64, the run at T = 48"}),
        (changed(shortest=64), "sink_rate", {92.47: ""}),
        (changed(shortest=48), "sink_rate", {92.47: "measured at T = 64, the run at T = 48 to 256"}),
        (changed(shortest=None), "sink_rate", {92.47: "measured at T = 64, the run at T = ? to 256"}),
        (changed(tokens=4096, shortest=100), "inf_norm_peak",
         {2512.0: "measured at T = 4096, the run at T = 100 to 4096"}),
        (changed(kind="code"), "sink_rate", {92.47: "measured on natural text, the run on code text"}),
        (changed(opening="never"), "sink_rate",
         {92.47: "measured on plain text, the run with another first token (never)"}),
        (NATURAL, "inf_norm_peak", {2512.0: "measured at T = 4096, the run at T = 256"}),
    ],
)  # fmt: skip
def test_what_was_measured_otherwise_is_not_comparable(run: Setting, metric: str, found: dict[float, str]) -> None:
    natural = published(run, metric, "natural (Pile)" if metric == "sink_rate" else None)
    assert {value: natural[value] for value in found} == found


def test_bos_and_dtype_have_to_be_the_same() -> None:
    long = changed(tokens=4096, shortest=4096)
    rows = [each for each in numbers_of(LLAMA) if each.number.metric == "inf_norm_peak"]
    with_bos, without = sorted(rows, key=lambda each: not each.bos)
    assert with_bos.difference(long) == ""
    assert without.difference(long) == "measured without BOS, the run with it"
    assert (
        with_bos.difference(changed(tokens=4096, shortest=4096, dtype="float32"))
        == "measured in bfloat16, the run in float32"
    )
    random = changed(kind="random", bos=False, opening="none", tokens=64)
    assert published(random, "sink_rate", "random") == {90.13: ""}


def test_numbers_measured_alike_stand_beside_their_column() -> None:
    (entry,) = atlas([named(LLAMA)])
    assert {name: [each.number.value for each in found] for name, found in entry.published.items()} == {
        "sink_rate_64": [92.47]
    }
    found = row(named(LLAMA))
    assert found["published"] == "sink_rate_64 92.47 % (natural (Pile); Gu et al. 2410.10781 table 1)"
    assert "18 x perplexity: a scan measures no loss" in found["not_comparable"]
    assert "2 x inf_norm_peak: measured at T = 4096, the run at T = 256" in found["not_comparable"]
    assert atlas([named("nobody/knows")])[0].published == {}


def test_a_model_with_an_adapter_has_no_published_numbers() -> None:
    from sinkscope.runs.schema.manifest import AdapterFacts

    run = named(LLAMA)
    run.manifest.model.adapter = AdapterFacts(path="a", kind="LORA", base=None, files={}, base_weights_sha256=None)
    (entry,) = atlas([run])
    assert not entry.published
    assert not entry.not_comparable


def test_a_super_weight_holds_for_any_text() -> None:
    (entry,) = atlas([named("huggyllama/llama-7b", "random", 16)])
    assert [each.number.value for each in entry.published["super_weights"]] == [2, 3968, 7003]


def test_the_command(tmp_path: Path) -> None:
    scanned().save(tmp_path / "a")
    evil = scanned("noise")
    evil.manifest.model.id = "=cmd()"
    evil.save(tmp_path / "b")
    out, csv = tmp_path / "atlas.html", tmp_path / "atlas.csv"
    words = ["atlas", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(out), "--csv", str(csv)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Attention sinks: 2 runs" in out.read_text("utf-8")
    table = pd.read_csv(csv)
    assert list(table) == COLUMNS
    assert table["model"].tolist() == ["tiny", "'=cmd()"]
    assert table["bos_mass"].tolist() == pytest.approx(
        [run.summary.streams["text"].bos_mass.mean for run in (scanned(), evil)]
    )


@pytest.mark.parametrize("words", [["nowhere"], ["a", "-o", "no/atlas.html"], ["a", "--csv", "no/atlas.csv"]])
def test_bad_input_is_one_line_and_writes_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    scanned().save(tmp_path / "a")
    result = CliRunner().invoke(app, ["atlas", *words])
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
