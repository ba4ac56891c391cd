"""Every sink of every sequence: against whole float64 maps, and in models whose sinks are planted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from models import random_ids, tiny
from reference import measure
from tiers import slow_but

import sinkscope
from sinkscope.runs.run import load_run

LOUD = 5
"""The token whose embedding is massive in the planted models."""
NUMBERS = ("alpha", "cos_first", "max_abs", "norm_ratio")


def loud(family: str, **sizes: Any) -> tuple[Any, torch.Tensor]:
    """A tiny model and three sequences; token LOUD, at position 0 and twice later, has one element of 900."""
    model = tiny(family, **sizes)
    with torch.no_grad():
        model.get_input_embeddings().weight[LOUD, 7] = 900.0
    ids = random_ids(3, 80)
    ids[ids == LOUD] = LOUD + 1
    ids[:, [0, 20, 75]] = LOUD
    return model, ids


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "bert", "gpt_oss"], "llama"))
def test_every_sink_against_whole_maps(family: str) -> None:
    model, ids = loud(family)
    if family != "gpt_oss":  # its experts' grouped matrix product knows no float64 on a CPU
        model = model.double()
    run = sinkscope.scan(model, data=ids, self_check=False, epsilon=0.1, batch_size=2)
    expected = pd.DataFrame(
        measure(model, ids, epsilon=0.1).sinks,
        columns=["sequence", "layer", "kind", "head", "position", *NUMBERS],
    )
    keys = ["sequence", "layer", "kind", "head", "position"]
    assert run.sinks is not None
    ours = run.sinks.assign(head=run.sinks["head"].astype(float)).sort_values(keys, ignore_index=True)
    expected = expected.sort_values(keys, ignore_index=True)
    assert len(ours) > 30
    if family in ("llama", "gpt_oss"):  # the others normalise their embeddings first
        assert set(ours["kind"]) == {"attention", "state", "massive"}
    for key in keys:
        assert ours[key].tolist() == pytest.approx(expected[key].tolist(), nan_ok=True) if key == "head" else (
            ours[key].tolist() == expected[key].tolist()
        )  # fmt: skip
    for name in NUMBERS:
        np.testing.assert_allclose(ours[name], expected[name], rtol=1e-5, atol=1e-6)
    assert (ours["id"].to_numpy(int) == ids.numpy()[ours["sequence"], ours["position"]]).all()


def biased(token: int) -> Any:
    """A GPT-2 of one layer: head 0 gives every earlier `token` all attention, the other heads attend uniformly."""
    model = tiny("gpt2", n_layer=1)
    width, attention = model.config.n_embd, model.h[0].attn.c_attn
    with torch.no_grad():
        model.wpe.weight[:, -1] = 0
        model.wte.weight[:, -1] = 0
        model.wte.weight[token, -1] = 50.0
        attention.weight[:, : 2 * width] = 0
        attention.bias[: 2 * width] = 0
        attention.bias[0] = 4.0
        attention.weight[-1, width] = 2.0
        model.h[0].ln_1.weight[-1], model.h[0].ln_1.bias[-1] = 1.0, 0.0
    return model


def planted_ids() -> torch.Tensor:
    """Four sequences of 60 tokens that hold token 9 once, where at least 16 queries see it."""
    ids = random_ids(4, 60)
    ids[ids == 9] = 10
    ids[range(4), [3, 11, 30, 44]] = 9
    return ids


def test_a_planted_key_bias_makes_its_token_the_only_sink() -> None:
    run = sinkscope.scan(biased(9), data=planted_ids(), self_check=False)
    assert run.sinks is not None
    assert run.tokens is not None
    assert run.sinks["position"].tolist() == [3, 11, 30, 44]
    assert run.sinks["alpha"].tolist() == pytest.approx([1] * 4, abs=1e-4)
    [row] = run.tokens.to_dict("records")
    found = {name: row[name] for name in ("kind", "id", "token", "region", "first", "occurrences", "sinks", "heads")}
    assert found == {
        "kind": "attention", "id": 9, "token": "9", "region": "text", "first": False, "occurrences": 4, "sinks": 4,
        "heads": 1,
    }  # fmt: skip
    assert [row[name] for name in ("rate", "sequences", "lifetime", "sink_share")] == [1, 4, 1, 1]
    assert run.heads["sink_elsewhere"].tolist() == [1, 0, 0, 0]
    assert run.heads["first4_boost"][1:].tolist() == pytest.approx([1, 1, 1])
    beyond = run.summary.streams["text"].sinks_beyond_first
    assert beyond is not None
    assert (beyond.created, beyond.gone, beyond.others) == (0, None, 0)
    assert run.summary.streams["text"].in_words[-1] == (
        "Sinks beyond the first token (alpha_k > 0.3): '9' (4 of 4 occurrences, in 1 head). The first is in layer 0; "
        "some are in the last layer."
    )


def test_occurrences_that_too_few_queries_see_do_not_count() -> None:
    """15 rows are too few: neither a sink there, nor an occurrence without one."""
    ids = planted_ids()
    ids[0, [45, 59]] = 9
    run = sinkscope.scan(biased(9), data=ids, self_check=False)
    assert run.tokens is not None
    assert run.tokens["occurrences"].tolist() == [4]


def test_no_sink_and_too_short_to_tell() -> None:
    model, ids = biased(9), random_ids(2, 60)
    ids[ids == 9] = 10
    none = sinkscope.scan(model, data=ids, self_check=False)
    assert none.sinks is not None
    assert len(none.sinks) == 0
    assert none.heads["sink_elsewhere"].tolist() == [0] * 4
    assert none.summary.streams["text"].in_words[-1] == "Sinks beyond the first token (alpha_k > 0.3): none."
    short = sinkscope.scan(model, data=ids[:, :15], self_check=False)
    assert short.heads["sink_elsewhere"].isna().all()


@pytest.mark.slow
def test_padding_batches_and_own_metrics_change_no_sink(tmp_path: Path) -> None:
    """Padded rows beside a user's metric, in batches of two, give the sinks of the sequences one by one."""
    own = tmp_path / "own.py"
    own.write_text(
        "import sinkscope\n\n\n@sinkscope.head_metric(unit='-', range='-')\ndef twice(view):\n"
        "    '''Twice A[0,0].'''\n    return 2 * view.attention.first[..., 0]\n"
    )
    model, ids = loud("llama", num_hidden_layers=1)
    mask = torch.ones_like(ids)
    mask[0, 50:], mask[2, :11] = 0, 0
    ids[2, 11] = LOUD
    run = sinkscope.scan(
        model,
        data={"input_ids": ids, "attention_mask": mask},
        self_check=False,
        epsilon=0.05,
        batch_size=2,
        metrics=[own],
    )
    assert run.sinks is not None
    assert "twice" in run.heads
    for number, row in enumerate((ids[0, :50], ids[1], ids[2, 11:])):
        alone = sinkscope.scan(model, data=row[None], self_check=False, epsilon=0.05).sinks
        assert alone is not None
        assert set(alone["kind"]) == {"attention", "state", "massive"}
        ours = run.sinks[run.sinks["sequence"] == number].reset_index(drop=True).assign(sequence=0)
        pd.testing.assert_frame_equal(ours.astype({"sequence": "int32"}), alone, rtol=1e-5)


@pytest.mark.slow
def test_sinks_survive_a_resume_and_a_saved_run(tmp_path: Path) -> None:
    model, ids = loud("llama", num_hidden_layers=1)
    asked: dict[str, Any] = {"data": ids, "self_check": False, "epsilon": 0.05, "batch_size": 1}

    def stop(stage: str, done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    whole = sinkscope.scan(model, **asked)
    with pytest.raises(sinkscope.Interrupted) as stopped:
        sinkscope.scan(model, **asked, shards=tmp_path / "run", progress=stop)
    part, full = stopped.value.run.sinks, whole.sinks
    assert part is not None
    assert full is not None
    pd.testing.assert_frame_equal(part, full[full["sequence"] < 2].reset_index(drop=True))
    resumed = sinkscope.scan(model, **asked, shards=tmp_path / "run", resume=True)
    resumed.save(tmp_path / "run")
    loaded = load_run(tmp_path / "run")
    pd.testing.assert_frame_equal(loaded.sinks, full)
    pd.testing.assert_frame_equal(loaded.tokens, whole.tokens, rtol=1e-8)
