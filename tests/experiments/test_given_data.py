"""Text and token ids handed over in Python to what measures a loss, as a scan takes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models import random_ids
from tiers import slow_but

import sinkscope

T = 24


def measured(model: Any, data: Any, **settings: Any) -> Any:
    return sinkscope.arms(model, ["keys:first1"], data=data, draws=2, **settings)


def test_token_ids_are_read_as_they_are(tiny_model: Any) -> None:
    ids = random_ids(4, T)
    found = measured(tiny_model, ids)
    facts = found.facts["data"]
    assert (facts["spec"], facts["sequences"], facts["seq_len"]) == ("token ids", 4, T)
    assert facts["fingerprint"] == sinkscope.scan(tiny_model, data=ids, self_check=False).manifest.data[0].fingerprint
    own = found.sequences[found.sequences["arm"] == "unablated"]["loss"]
    with torch.no_grad():
        logits = tiny_model(ids).logits.double()
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)
    assert own.to_numpy() == pytest.approx(expected.numpy(), rel=1e-5)


@pytest.mark.parametrize("shape", slow_but(["list", "array", "mapping", "padded"], "mapping", "padded"))
def test_every_shape_of_token_ids_gives_the_same(shape: str, tiny_model: Any) -> None:
    ids = random_ids(3, T)
    padded = torch.nn.functional.pad(ids, (2, 0))
    mask = torch.ones_like(padded)
    mask[:, :2] = 0
    given: dict[str, Any] = {
        "list": ids.tolist(), "array": ids.numpy(), "mapping": {"input_ids": ids},
        "padded": {"input_ids": padded, "attention_mask": mask},
    }  # fmt: skip
    expected, found = (measured(tiny_model, data) for data in (ids, given[shape]))
    assert found.table.equals(expected.table)
    assert found.facts["data"] == expected.facts["data"]


def test_texts_are_read_as_a_scan_reads_them(tiny_model: Any, tokenizer: Any) -> None:
    texts = ["The ferry bell rang twice before the fog took the harbour. " * 9, "Nobody saw the boat come in. " * 9]
    found = measured(tiny_model, texts, tokenizer=tokenizer, seq_len=T)
    scanned = sinkscope.scan(tiny_model, data=texts, tokenizer=tokenizer, seq_len=T, self_check=False)
    assert found.facts["data"]["spec"] == "texts"
    assert found.facts["data"]["fingerprint"] == scanned.manifest.data[0].fingerprint


def test_sequences_that_the_run_has_read_are_left_out(tiny_model: Any) -> None:
    ids = random_ids(6, T)
    run = sinkscope.scan(tiny_model, data=ids[:4], self_check=False)
    assert measured(tiny_model, ids, run=run).facts["data"]["documents"] == ["sequence 4", "sequence 5"]
    assert sinkscope.ablate(
        tiny_model, run, data=ids, fractions=[0.25], draws=2
    ).facts["data"]["documents"] == ["sequence 4", "sequence 5"]  # fmt: skip
    with pytest.raises(sinkscope.SinkscopeError, match="the run has read it all"):
        measured(tiny_model, ids[:4], run=run)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (["prose", "code"], "a loss is measured on one SPEC, not 2"),
        ({"pixel_values": torch.zeros(1, 3, 8, 8)}, "a loss is measured on text, not on pixel_values"),
        ([[1, 2, 3], [1, 2, 3, 4]], "3 to 4 tokens, and a loss is measured on sequences of one length: give seq_len="),
        (torch.zeros(2, 8), "token ids (integers, [sequence, token]) are needed, not Tensor"),
        (5, "are needed, not int"),
        ("nonesuch", "unknown data 'nonesuch'"),
    ],
)
def test_anything_else_is_refused_in_one_line(data: Any, reason: str, tiny_model: Any) -> None:
    for measure in (sinkscope.arms, sinkscope.dry_run_arms):
        with pytest.raises(sinkscope.SinkscopeError) as refused:
            measure(tiny_model, ["keys:first1"], data=data)
        assert reason in str(refused.value)
        assert "\n" not in str(refused.value)


def test_a_dry_run_counts_the_sequences_that_are_given(tiny_model: Any) -> None:
    found = sinkscope.dry_run_arms(tiny_model, ["keys:first1"], data=random_ids(4, T), draws=2)
    (own,) = [passes for passes in found.passes if passes.what == "arms"]
    assert (own.sequences, own.length) == (4 * 4, T), "unablated, the arm, and two draws of its control"


@pytest.mark.parametrize(("given", "expected"), [({}, 4), ({"num_sequences": 2}, 2)])
def test_the_callback_reads_as_many_token_ids_as_it_is_told(
    given: dict[str, int], expected: int, tiny_model: Any
) -> None:
    callback = sinkscope.SinkCallback(data=random_ids(4, T), **given)
    callback.measure(0, tiny_model)
    assert callback.run is not None
    assert callback.run.manifest.sequences_done == expected


def test_the_callback_reads_as_many_sequences_of_texts_as_it_is_told(tiny_model: Any, tokenizer: Any) -> None:
    texts = ["The ferry bell rang twice before the fog took the harbour. " * 9] * 4
    callback = sinkscope.SinkCallback(data=texts, tokenizer=tokenizer, seq_len=T, num_sequences=3)
    callback.measure(0, tiny_model)
    assert callback.run is not None
    assert callback.run.manifest.sequences_done == 3
