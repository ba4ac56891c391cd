"""Runs, baselines and shards written by sinkscope 0.1 are still read, or refused as too old in one line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sinkscope.comparison.baseline import baseline_of, baseline_text, read_baseline
from sinkscope.comparison.compare_runs import compare
from sinkscope.comparison.gate import check
from sinkscope.engine.scan import scan, scan_request
from sinkscope.errors import SinkscopeError
from sinkscope.runs.run import load_run

OLD = Path(__file__).parents[1] / "fixtures" / "v0_1"


def test_a_run_of_two_bos_modes_is_read() -> None:
    run = load_run(OLD / "two-bos")
    assert [(data.domain, data.spec, data.bos) for data in run.manifest.data] == [
        ("prose bos=always", "prose", "always"), ("prose bos=never", "prose", "never"),
    ]  # fmt: skip
    asked = run.manifest.request
    assert (asked.data, asked.bos, asked.seq_len, asked.num_sequences) == (("prose",), ("always", "never"), 16, 3)
    assert set(run.summary.domains) == {"prose bos=always", "prose bos=never"}
    assert len(run.heads) == 2 * 2 * 4


def test_what_decided_its_columns_is_read() -> None:
    asked = load_run(OLD / "smoothing").manifest.request
    assert (asked.spectra, asked.epsilon, asked.dormant_rule) == (1, 0.3, "honor<0.4")
    assert asked.measures == ("smoothing",)


@pytest.mark.slow
def test_it_is_scanned_again_as_it_was(tiny_model: Any, tokenizer: Any) -> None:
    """What `check MODEL` and `compare RUN MODEL` do: both ways to choose the first token, the same sequences."""
    old = load_run(OLD / "two-bos")
    request = old.manifest.request.of_model("tiny")
    new = scan_request(request, model=tiny_model, tokenizer=tokenizer)
    assert [data.fingerprint for data in new.manifest.data] == [data.fingerprint for data in old.manifest.data]
    found = compare(old, new)
    assert found.paired
    assert found.heads["difference"].abs().max() < 1e-6
    verdict = check(new, read_baseline(OLD / "two-bos.json"))
    assert verdict.passed
    assert set(verdict.same_text.values()) == {True}


def test_its_baseline_is_read() -> None:
    baseline = read_baseline(OLD / "two-bos.json")
    assert baseline.request.data == ("prose",)
    assert baseline.request.bos == ("always", "never")
    ours = baseline_of(load_run(OLD / "two-bos"))
    assert ours.levels.keys() == baseline.levels.keys()
    assert [data.domain for data in ours.facts.data] == [data.domain for data in baseline.facts.data]


def test_a_saved_run_of_0_1_is_written_in_todays_form(tmp_path: Path) -> None:
    run = load_run(OLD / "two-bos")
    run.save(tmp_path / "again")
    assert load_run(tmp_path / "again").manifest == run.manifest
    path = tmp_path / "baseline.json"
    path.write_text(baseline_text(baseline_of(run)), "utf-8")
    assert read_baseline(path).request == run.manifest.request


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda table: table.iloc[:-1], "heads.csv has 15 rows, and 16 by the manifest"),
        (
            lambda table: table.rename(columns={"bos_mass": "mass"}),
            "heads.csv has other columns than the manifest says",
        ),
        (lambda table: table.assign(layer="first"), "layer of heads.csv holds values that are no int64"),
        (lambda table: table.assign(layer=float("nan")), "layer of heads.csv holds values that are no int64"),
        (lambda table: table.iloc[[0, *range(15)]], "heads.csv holds a row twice"),
    ],
    ids=["a row less", "another column", "text", "nothing", "a row twice"],
)
def test_its_tables_are_held_to_their_rows_and_columns(
    change: Callable[[pd.DataFrame], pd.DataFrame], said: str, tmp_path: Path
) -> None:
    """0.1 recorded no SHA-256 of its files."""
    folder = Path(shutil.copytree(OLD / "two-bos", tmp_path / "run"))
    change(pd.read_csv(folder / "heads.csv")).to_csv(folder / "heads.csv", index=False)
    with pytest.raises(SinkscopeError, match=rf"is damaged: {re.escape(said)}$"):
        load_run(folder)


def test_its_shards_are_named_as_too_old(tiny_model: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD / "unfinished", tmp_path / "unfinished"))
    with pytest.raises(SinkscopeError, match=r"unfinished scan of sinkscope 0\.1\.0.*--force"):
        scan(tiny_model, data="random", seq_len=16, num_sequences=6, batch_size=1, shards=folder, resume=True)
    assert len(list((folder / "shards").glob("*.safetensors"))) == 2


@pytest.mark.parametrize("spec", ["token ids", "pixel_values", "token ids and pictures"])
def test_data_that_0_1_did_not_record_are_refused(spec: str, tmp_path: Path) -> None:
    """0.1 wrote no folder of pictures into the manifest, and called the data `pixel_values`."""
    folder = Path(shutil.copytree(OLD / "smoothing", tmp_path / "run"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    manifest["data"][0] |= {"spec": spec, "source": spec}
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    request = load_run(folder).manifest.request
    with pytest.raises(SinkscopeError, match=f"the {spec} of that scan .* cannot be read again"):
        scan_request(request.of_model("other"))


@pytest.mark.parametrize("version", [0, 4, 99, "1", None])
def test_other_versions_are_refused(version: object, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD / "two-bos", tmp_path / "run"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"schema_version": version}), "utf-8")
    with pytest.raises(SinkscopeError, match="schema version"):
        load_run(folder)


@pytest.mark.parametrize("path", [("data",), ("model", "id"), ("data", 0, "fingerprint"), ("bos",), ("self_check",)])
def test_a_damaged_manifest_names_the_field(path: tuple[Any, ...], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(OLD / "two-bos", tmp_path / "run"))
    manifest = json.loads((folder / "manifest.json").read_text("utf-8"))
    inner = manifest
    for step in path[:-1]:
        inner = inner[step]
    del inner[path[-1]]
    (folder / "manifest.json").write_text(json.dumps(manifest), "utf-8")
    with pytest.raises(SinkscopeError, match=f"damaged.*{path[-1]}") as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)
