"""Sentences agree with their numbers."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from small_run import make_run

from sinkscope.questions.modules.tables import add_modules
from sinkscope.questions.smoothing.tables import _words as smoothing_words
from sinkscope.questions.spikes.tables import add_spikes
from sinkscope.runs.schema.stream import DormantHeads
from sinkscope.runs.words import _sink_words, _window_words, dormant_words, of_heads


@pytest.mark.parametrize(
    ("some", "heads", "verb", "text"),
    [(1, 72, "give", "1 of 72 heads gives"), (2, 72, "give", "2 of 72 heads give"), (0, 9, "move", "0 of 9 heads move"),
     (1, 1, "have", "1 of 1 head has"), (0, 1, "have", "0 of 1 head has")],
)  # fmt: skip
def test_the_verb_agrees_with_the_heads_that_are_counted(some: int, heads: int, verb: str, text: str) -> None:
    assert of_heads(some, heads, verb) == text


def test_one_head_is_spoken_of_as_one() -> None:
    summary = make_run().summary.streams["text"]
    one = summary.model_copy(update={"sink_heads": 1, "heads": 8})
    assert _sink_words(one, 0.3).startswith("Attention sink: 1 of 8 heads gives the first token more than 0.3 of its ")
    counts = {"smooths": 1, "sharpens": 0, "neither": 7, "differs": 0, "missing": 0, "equal": 0}
    assert "1 of 8 heads makes tokens more similar the denser it attends, 0 less" in smoothing_words(counts, 8)
    dormant = DormantHeads(rule="honor<0.4", count=0, heads=[])
    assert dormant_words(dormant, 1) == "none of 1 head"


@pytest.mark.parametrize(
    ("tensor", "token", "text"),
    [(0.93, 0.46, "down_proj loses most: 93 % of its input rounds to 0, with per-token quantisation 46 %"),
     (0.001, 0.0, "less than 1 % of its input rounds to 0, with per-token quantisation 0 %"),
     (0.0, 0.0, "no entry of any module's input rounds to 0.")],
)  # fmt: skip
def test_a_module_that_loses_nothing_is_not_said_to_lose_most(tensor: float, token: float, text: str) -> None:
    summary = make_run().summary
    row: dict[str, Any] = {
        "stream": "text",
        "module": "down_proj",
        "underflow_tensor": tensor,
        "underflow_token": token,
    }
    add_modules(summary.streams, pd.DataFrame([row | {"amax_token": "<bos>", "amax_position": 0}]))
    assert text in summary.streams["text"].in_words[-1]


@pytest.mark.parametrize(
    ("far", "layers", "text"),
    [(1, 3, "1 of 3 layers has a window shorter than T: its"),
     (2, 3, "2 of 3 layers have a window shorter than T: their"),
     (1, 1, "1 of 1 layer has a window")],
)  # fmt: skip
def test_windows_are_told_with_what_they_mean_for_alpha_0(far: int, layers: int, text: str) -> None:
    words = _window_words(far, layers)
    assert words.startswith(text)
    assert words.endswith("later queries cannot reach the first token, and count as 0 in alpha_0.")


def test_a_number_of_one_dataset_names_it_where_there_are_several() -> None:
    """What stands out most, in whichever dataset, is no number over all of them."""
    streams = make_run().summary.streams
    module: dict[str, Any] = {"stream": "text", "module": "down_proj", "amax_token": "<bos>", "amax_position": 0}
    module |= {"underflow_token": 0.0}
    loses = [module | {"domain": name, "underflow_tensor": share} for name, share in (("a", 0.1), ("b", 0.2))]
    add_modules(streams, pd.DataFrame(loses))
    assert streams["text"].in_words[-1].startswith("Modules on b: with per-tensor quantisation to 8 bits, down_proj")
    assert streams["text"].measured["modules"]["domain"] == "b"
    part: dict[str, Any] = {
        "stream": "text", "part": "mlp", "channel": 3, "position": 0, "neuron": None, "neuron_share": None,
        "super_weight": False,
    }  # fmt: skip
    writes = [("a", 0, 0.4, "up"), ("a", 1, -0.9, "down"), ("b", 0, 0.8, "up"), ("b", 1, 0.2, "up")]
    rows = [part | dict(zip(("domain", "layer", "share", "step"), values, strict=True)) for values in writes]
    add_spikes(streams, pd.DataFrame(rows), set())
    assert streams["text"].in_words[-1] == (
        "Spikes on b: the mlp of layer 0 writes 80 % of the rise of channel 3 at position 0."
    )
    add_spikes(streams, pd.DataFrame(rows[:2]), set())
    assert streams["text"].in_words[-1] == (
        "Spikes: the mlp of layer 0 writes 40 % of the rise of channel 3 at position 0; the mlp of layer 1 takes 90 % "
        "away."
    )
    assert "domain" not in streams["text"].measured["spikes"]
