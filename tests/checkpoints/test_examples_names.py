"""Names that a misspelt example may mean."""

from __future__ import annotations

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


def test_ids_of_the_hub_are_not_told_of_examples() -> None:
    assert "example:" not in near_hub_names("meta-lama/Llama-3.2-1B")
