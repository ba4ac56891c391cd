"""Names that a misspelt example may mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from sinkscope.checkpoints.hub import near_hub_names


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exmple:gemma-3-270m", "; did you mean example:gemma-3-270m?"),
        ("exemple:minilm", "; did you mean example:minilm?"),
        ("exampel:trigger-relu", "; did you mean example:trigger-relu?"),
    ],
)
def test_a_misspelt_example_is_told_the_near_one(name: str, said: str) -> None:
    assert near_hub_names(name).startswith(said.rstrip("?"))


@pytest.mark.parametrize("name", ["gemma-3-270m", "google/gemma-3-270m"])
def test_an_example_of_that_name_is_told(name: str) -> None:
    assert near_hub_names(name) == "; example:gemma-3-270m needs no hub (`sinkscope examples` describes it)"


def test_a_well_known_id_is_not_taken_for_a_misspelt_one() -> None:
    assert near_hub_names("google/gemma-3-1b-pt") == ""


def test_ids_of_the_hub_are_not_told_of_examples() -> None:
    assert "example:" not in near_hub_names("meta-lama/Llama-3.2-1B")


def test_a_folder_of_nearly_that_name_is_suggested_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("checkpoint-200", "config.json"), ("checkpoint-300", "notes.txt")):
        (tmp_path / "out" / name).mkdir(parents=True)
        (tmp_path / "out" / name / file).touch()
    monkeypatch.chdir(tmp_path)
    for name in ("out/chekpoint-200", "out/checkpoint-310"):
        assert near_hub_names(name) == "; did you mean out/checkpoint-200?"
    assert near_hub_names("../nowhere/else") == ""
