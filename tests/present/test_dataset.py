"""Runs as a dataset folder of the model hub, and ids of tokens for quantisers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from desk import hostile, scanned
from huggingface_hub import DatasetCard
from typer.testing import CliRunner

from sinkscope.cli import app
from sinkscope.present.card import dataset_card
from sinkscope.runs.atlas import atlas, atlas_table
from sinkscope.runs.run import load_run

TWO_TEXTS = Path(__file__).parents[1] / "fixtures" / "v0_1" / "two-bos"


def call(*words: object) -> Any:
    return CliRunner().invoke(app, ["export", *map(str, words)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with one text and a run of an older sinkscope with two."""
    home = tmp_path_factory.mktemp("dataset")
    scanned().save(home / "one")
    result = call(home / "one", TWO_TEXTS, "--format", "hf-dataset", "-o", home / "out")
    assert result.exit_code == 0, result.output
    return home / "out"


def test_the_card_names_every_file_as_a_configuration(folder: Path) -> None:
    card = DatasetCard.load(folder / "README.md")
    paths = {each["config_name"]: each["data_files"][0]["path"] for each in card.data.configs}
    assert set(paths.values()) | {"README.md"} == {path.name for path in folder.iterdir()}
    assert all(path == f"{name}.parquet" for name, path in paths.items())
    assert {"atlas", "heads", "layers", "sequences"} <= set(paths)
    assert "one: tiny, revision -, float32, token ids: 8 sequences of 48 tokens" in card.text
    for name, path in paths.items():
        assert f"- `{name}`: a row is " in card.text
        assert f"; {len(pd.read_parquet(folder / path))} rows." in card.text


def test_every_row_of_every_run_is_there_with_every_digit(folder: Path) -> None:
    one, two = load_run(folder.parent / "one"), load_run(TWO_TEXTS)
    heads = pd.read_parquet(folder / "heads.parquet")
    assert heads["run"].tolist() == ["one"] * len(one.heads) + ["two-bos"] * len(two.heads)
    assert heads["bos_mass"].tolist() == [*one.heads["bos_mass"], *two.heads["bos_mass"]]
    assert heads["domain"].tolist() == ["token ids"] * len(one.heads) + two.heads["domain"].tolist()
    assert list(heads)[:3] == ["run", "model", "domain"]
    assert pd.read_parquet(folder / "tokens.parquet")["run"].unique().tolist() in (["one"], []), "0.1 wrote none"
    rows = pd.read_parquet(folder / "atlas.parquet")
    pd.testing.assert_frame_equal(rows, atlas_table(atlas([one, two])), check_dtype=False)


def test_a_second_export_replaces_the_first_and_no_other_folder(folder: Path, tmp_path: Path) -> None:
    again = call(folder.parent / "one", "--format", "hf-dataset", "-o", folder)
    assert again.exit_code == 0
    assert pd.read_parquet(folder / "heads.parquet")["run"].unique().tolist() == ["one"]
    before = sorted(path.name for path in (folder.parent / "one").iterdir())
    refused = call(folder.parent / "one", "--format", "hf-dataset", "-o", folder.parent / "one")
    assert refused.exit_code == 2
    assert "holds files that are not a dataset's" in refused.stderr
    assert sorted(path.name for path in (folder.parent / "one").iterdir()) == before


def test_names_stay_text_in_the_card() -> None:
    run = hostile(scanned(), "---\nlicense: mit\n# <script>x")
    card = DatasetCard(dataset_card([run], {"heads": run.heads}))
    assert "license" not in card.data.to_dict()
    assert "<script>" not in card.text
    assert "\n# <" not in card.text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--format", "hf-dataset"], "writes a folder: name it with -o"),
        (["--format", "hf-dataset", "--metric", "entropy", "-o", "x"], "writes every table"),
        (["--format", "ids"], "writes the ids of --tokens"),
        (["--format", "ids", "--heads", "sink"], "writes the ids of --tokens"),
        (["--format", "csv", "--tokens", "sink"], "writes a list, not a table"),
    ],
)
def test_options_that_clash_are_refused(words: list[str], said: str, tmp_path: Path) -> None:
    scanned().save(tmp_path / "run")
    result = call(tmp_path / "run", *words)
    assert result.exit_code == 2
    assert said in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_ids_of_tokens_stand_one_a_line(tmp_path: Path) -> None:
    run = scanned()
    token = {"stream": "text", "kind": "attention", "token": "a", "region": "text", "first": False, "occurrences": 8}
    rest = {"sinks": 3, "rate": 0.375, "heads": 2, "first_layer": 0, "last_layer": 1}
    ids = pd.array([7, 3, 7, None], dtype="Int64")
    run.tokens = pd.DataFrame([token | rest] * 4).assign(id=ids)
    run.save(tmp_path / "run")
    words = ("--tokens", "sink", "--format", "ids", "--min-rate")
    assert call(tmp_path / "run", *words, "0.375").stdout == "7\n3\n"
    assert call(tmp_path / "run", *words, "0.376").stdout == ""
    assert call(tmp_path / "run", "--tokens", "massive", "--format", "ids").stdout == ""
    two = pd.concat([run.heads, run.heads.assign(stream="vision")], ignore_index=True)
    run.heads = two
    run.save(tmp_path / "run", force=True)
    refused = call(tmp_path / "run", "--tokens", "sink", "--format", "ids")
    assert refused.exit_code == 2
    assert "streams text, vision; write JSON" in refused.stderr
