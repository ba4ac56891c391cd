"""Massive activations in a summary: the largest of the massive ones, and the sentence."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from models import random_ids, tiny

from sinkscope import scan
from sinkscope.runs.schema.stream import MassiveActivations, MassiveChannel
from sinkscope.runs.words import _massive_words
from sinkscope.tables.summary import LARGEST, _largest, _massive_channels
from sinkscope.tables.values import Stream


def layer(number: int, peaks: list[float], massive: list[float]) -> tuple[Any, list[Any]]:
    """One attention call whose sequences have these largest elements, massive or not."""
    columns = dict.fromkeys(LARGEST, np.arange(10.0, 10 + len(peaks)))
    columns |= {"inf_norm": np.array(peaks), "massive_tokens": np.array(massive)}
    return SimpleNamespace(layer=number), [SimpleNamespace(count=len(peaks), layer=columns.__getitem__)]


def test_the_largest_is_one_of_the_massive() -> None:
    """An element may be larger than any massive one where its layer's median is large too."""
    measured = [layer(1, [300, 500, 600], [1, 2, 0]), layer(2, [900, 800, 700], [0, 0, 0])]
    stream = Stream([], measured)
    number, found = _largest(stream, True)
    assert (number, found["inf_norm"], found["max_abs_token"]) == (1, 500, 11)
    assert _largest(stream, False)[0] == 2
    assert _largest(Stream([], [layer(0, [np.nan], [np.nan]), *measured]), False)[0] == 2


@pytest.mark.slow
def test_the_block_that_brings_the_first_token_back_is_named() -> None:
    """Blocks 0 and 2 of 3 multiply what they return by 100 and 0.001."""
    model = tiny("llama")
    for number, factor in ((0, 100.0), (2, 0.001)):
        model.layers[number].register_forward_hook(lambda module, args, output, factor=factor: output * factor)
    norm = scan(model, data=random_ids(2, 20), self_check=False).summary.streams["text"].first_token_norm
    assert (norm.spike_layer, norm.fall_layer) == (0, 2)
    assert norm.max_ratio is not None


def test_a_first_token_of_zeros_has_a_norm_ratio() -> None:
    """BOS is 0 where it is the token that pads, too."""
    model = tiny("llama", pad_token_id=1)
    ids = random_ids(2, 20)
    ids[:, 0] = 1
    run = scan(model, data=ids, self_check=False)
    assert run.layers["norm_ratio"].eq(0).all()
    norm = run.summary.streams["text"].first_token_norm
    assert (norm.spike_layer, norm.fall_layer, norm.max_ratio) == (None, None, 0)


def test_every_channel_with_massive_elements_is_listed() -> None:
    """`--arm massive` changes all of them. Those that hold most come first."""
    massive = Counter({(0, channel): 1 + (channel == 11) for channel in range(12)})
    stream = Stream([], [(SimpleNamespace(layer=1), [SimpleNamespace(count=2, massive=massive)])])  # type: ignore[list-item]
    channels = _massive_channels(stream, ["<s>"])
    assert [channel.channel for channel in channels] == [11, *range(11)]
    assert channels[0].tokens_per_sequence == 1
    assert channels[0].positions[0].token == "<s>"


def test_massive_activations_in_words() -> None:
    def channel(number: int) -> MassiveChannel:
        return MassiveChannel(channel=number, layers=[1], tokens_per_sequence=1.0, positions=[])

    massive = MassiveActivations(
        present=True, layers=[1, 2, 3, 7, 9, 10], max_abs=102013.98, layer=10, position=0, channel=163,
        channels=[channel(400), channel(163)],
    )  # fmt: skip
    assert _massive_words(massive) == (
        "Massive activations: in the inputs of layers 1 to 3, 7, 9 to 10, in channels 400 and 163. The largest "
        "of them, of absolute value 1.02e+05, enters layer 10 at position 0."  # layer 11 may hold a larger one
    )
    one = massive.model_copy(update={"layers": [4], "channels": [channel(each) for each in (1, 2, 3, 5, 8)]})
    assert "in the input of layer 4, in channels 1, 2 and 3 and 2 more. The" in _massive_words(one)
