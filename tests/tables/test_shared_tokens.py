"""The tokens of a summary: those that all sequences of all its datasets have at a position."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from sinkscope.tables.summary import _tokens
from sinkscope.tables.values import Places

SITES: list[Any] = [SimpleNamespace(name=name, stream=stream) for name, stream in (("a", "text"), ("b", "vision"))]


def of_text(*rows: list[int]) -> Places:
    ids = np.array(rows)
    return Places(np.full(ids.shape, "text"), ids)


def shared(**domains: dict[str, Places]) -> dict[str, list[str | None]]:
    """What `_tokens` says of datasets, each with the places of its sites."""
    read: list[Any] = [SimpleNamespace(name=name, sites=sites) for name, sites in domains.items()]
    places = {(name, site): own for name, sites in domains.items() for site, own in sites.items()}
    return _tokens(read, SITES, places)


def test_a_token_that_all_datasets_have_at_a_position_is_kept() -> None:
    """Of several datasets no token was told. 7 stands in all sequences of each at position 1, but 8 in the other."""
    prose, code = of_text([1, 7, 5, 4], [1, 7, 6, 4]), of_text([1, 8, 5], [1, 8, 5])
    assert shared(prose={"a": prose}) == {"text": ["1", "7", None, "4"]}
    assert shared(prose={"a": prose}, code={"a": code}) == {"text": ["1", None, None]}


def test_a_dataset_that_did_not_run_a_stream_says_nothing_of_its_tokens() -> None:
    text, pictures = of_text([1, 7]), Places(np.full((1, 2), "patch"))
    found = shared(prose={"a": text}, photos={"b": pictures})
    assert found == {"text": ["1", "7"], "vision": [None, None]}
