"""The baseline of uniform attention: what models with keys of zero measure, a naive float64 twin, and closed forms."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from families import speech_inputs, tiny_model
from models import WINDOW, random_ids, tiny
from tiers import slow_but
from transformers import AutoModel

import sinkscope
from sinkscope.capture.sites import AttentionKind
from sinkscope.present.figures import run as run_figures
from sinkscope.present.terminal.run import render_run
from sinkscope.tables.image_tokens import uniform_mass

KEYS = (".k_proj.", ".key.", ".k.", ".c_attn.", "relative_attention_bias")

Visible = Callable[[int, int], bool]


def without_keys(model: Any) -> Any:
    """The model with keys of zero: every query then attends alike to all keys that it may see."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in f".{name}" for part in KEYS):
                parameter.zero_()
    return model.eval()


def naive(queries: int, keys: int, visible: Visible, rows: int) -> float:
    """alpha_0 of uniform attention over the first rows, from the whole matrix in float64."""
    shown = np.array([[visible(i, k) for k in range(keys)] for i in range(queries)], dtype=np.float64)
    return float((shown / shown.sum(1, keepdims=True))[:rows, 0].mean())


def harmonic(count: int) -> float:
    return sum(1 / n for n in range(1, count + 1))


@pytest.mark.parametrize(
    ("family", "kinds", "closed"),
    [
        ("llama", [lambda i, k: k <= i], lambda n: harmonic(n) / n),
        ("bert", [lambda i, k: True], lambda n: 1 / 80),
        ("mistral", [lambda i, k: i - WINDOW < k <= i], lambda n: harmonic(WINDOW) / n),
        (
            "gemma2",
            [lambda i, k: i - WINDOW < k <= i, lambda i, k: k <= i, lambda i, k: i - WINDOW < k <= i],
            lambda n: (2 * harmonic(WINDOW) + harmonic(n)) / 3 / n,
        ),
    ],
)
def test_uniform_attention_has_the_baseline(family: str, kinds: list[Visible], closed: Callable[[int], float]) -> None:
    length = 80
    run = sinkscope.scan(without_keys(tiny(family)), data=random_ids(2, length), self_check=False)
    stream = run.summary.streams["text"]
    for ours, measured, rows in (
        (stream.uniform_alpha_0.T, "sink_score", length),
        (stream.uniform_alpha_0.t64, "sink_score_t64", 64),
    ):
        assert ours == pytest.approx(np.mean([naive(length, length, visible, rows) for visible in kinds]), rel=1e-12)
        assert ours == pytest.approx(closed(rows), rel=1e-12)
        assert ours == pytest.approx(run.heads[measured].mean(), rel=1e-5)


@pytest.mark.parametrize("family", slow_but(["llama", "bert"], "llama"))
def test_sequences_of_unequal_length_count_one_by_one(family: str) -> None:
    ids, lengths = random_ids(3, 70), (70, 66, 9)
    mask = torch.tensor([[int(place < length) for place in range(70)] for length in lengths])
    run = sinkscope.scan(without_keys(tiny(family)), data={"input_ids": ids, "attention_mask": mask}, self_check=False)
    stream = run.summary.streams["text"]
    expected = [harmonic(n) / n if family == "llama" else 1 / n for n in lengths]
    early = [harmonic(64) / 64 if family == "llama" else 1 / n for n in lengths[:2]]
    assert pytest.approx(np.mean(expected), rel=1e-12) == stream.uniform_alpha_0.T
    assert stream.uniform_alpha_0.t64 == pytest.approx(np.mean(early), rel=1e-12)
    assert pytest.approx(stream.sink_score.mean, rel=1e-5) == stream.uniform_alpha_0.T
    for name, rate in stream.uniform_rate_percent.items():
        assert pytest.approx(100 * np.mean(np.array(expected) > float(name))) == rate.T
        assert rate.t64 == pytest.approx(100 * np.mean(np.array(early) > float(name)))
    assert stream.uniform_rate_percent.keys() == stream.sink_rate_percent.keys()
    if family == "llama":  # in the shortest sequence, harmonic(9) / 9 is 0.314
        assert pytest.approx(100 / 3) == stream.uniform_rate_percent["0.3"].T
        assert pytest.approx(100 / 3) == stream.sink_rate_percent["0.3"].T


@pytest.mark.slow
def test_cross_attention_is_spread_over_the_encoder_s_keys() -> None:
    model = without_keys(tiny_model(AutoModel, "whisper"))
    given = speech_inputs("whisper", model.config) | {"decoder_input_ids": [[1, 4, 7], [1, 5, 8]]}
    streams = sinkscope.scan(model, data=given, self_check=False).summary.streams
    keys = streams["encoder"].tokens_per_sequence
    assert keys != 3
    expected = {"encoder": 1 / keys, "decoder": harmonic(3) / 3, "cross": 1 / keys}
    for name, stream in streams.items():
        assert pytest.approx(expected[name], rel=1e-12) == stream.uniform_alpha_0.T, name
        assert pytest.approx(stream.sink_score.mean, rel=1e-5) == stream.uniform_alpha_0.T, name


@pytest.mark.parametrize("family", slow_but(["llama", "mistral", "gemma2", "bert"], "gemma2"))
def test_the_figure_s_line_is_what_uniform_attention_measures(family: str) -> None:
    run = sinkscope.scan(without_keys(tiny(family)), data=random_ids(2, 150), self_check=False)
    lengths = np.array([64, 128, 150])
    line = run_figures._uniform(run, run.heads, lengths)
    assert line == pytest.approx(run.length_curve.groupby("length")["sink_score"].mean().to_numpy(), rel=1e-5)


@pytest.mark.parametrize(
    "kind",
    [AttentionKind("full"), AttentionKind("sliding", 4), AttentionKind("chunked", 4), AttentionKind("sliding", 50)],
)
def test_uniform_mass_on_image_tokens_is_the_double_loop_s(kind: AttentionKind) -> None:
    places = np.random.default_rng(0).random(30) < 0.4
    rows = []
    for i in range(30):
        start = {"full": 0, "sliding": max(0, i - (kind.size or 0) + 1), "chunked": i - i % (kind.size or 1)}[kind.name]
        rows.append(np.mean([places[k] for k in range(start, i + 1)]))
    assert uniform_mass(places, kind) == pytest.approx(np.mean(rows), rel=1e-12)


@pytest.mark.slow
def test_nothing_is_said_about_sinks_where_uniform_attention_passes_the_threshold() -> None:
    """At T = 2 uniform attention gives alpha_0 = 0.75; at T = 16 H_16 / 16 = 0.211, above 0.2 and below 0.3."""
    short = sinkscope.scan(tiny("llama"), data=random_ids(2, 2), self_check=False)
    stream = short.summary.streams["text"]
    assert stream.uniform_alpha_0.T == 0.75
    assert stream.in_words[0].startswith("Nothing can be said about sinks: ")
    assert not any("sink rate" in words or "strongest sink" in words for words in stream.in_words)
    assert (short.heads["sink_rate"] == 1).any()  # the column keeps its definition
    screen = render_run(short, width=100)
    assert re.search(r"T = 2 +- +- +- +\d", screen)
    longer = sinkscope.scan(tiny("llama"), data=random_ids(2, 16), self_check=False)
    assert "Nothing can be said" not in longer.summary.streams["text"].in_words[0]
    assert re.search(r"T = 16 +- +\d", render_run(longer, width=100))
