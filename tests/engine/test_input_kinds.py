"""Kinds of input: a kind added from outside the package, and which kind reads which request."""

from __future__ import annotations

from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from conftest import VOCABULARY
from families import tiny_model
from transformers import AutoModel

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.capture import Site
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward
from sinkscope.engine.input_kinds import INPUT_KINDS, Asked, InputKind, Reading, check_asked, claim, kind_asked_for
from sinkscope.inputs import Corpus, token_rules
from sinkscope.inputs.batches import TokenData, as_corpus, token_data
from sinkscope.runs.values import Domain

FIRST = 3
"""The token id that stands for byte 0 in the made-up model's vocabulary."""


class BytesInput(InputKind):
    """{"bytes": [...]}: every byte a token, counted from FIRST on."""

    name: ClassVar[str] = "bytes"

    @classmethod
    def asked_for(cls, asked: Asked) -> bool:
        return isinstance(asked.given, dict) and "bytes" in asked.given

    @classmethod
    def check(cls, asked: Asked) -> None:
        rows = asked.given["bytes"]
        if not rows or any(not isinstance(row, bytes) or len(row) < 2 for row in rows):
            raise SinkscopeError("bytes: a list of byte strings, each of at least 2, is needed")

    def read(self, positions: int) -> Reading:
        rows = [[FIRST + byte for byte in row] for row in self.asked.given["bytes"][: self.asked.num_sequences]]
        tokens: TokenData = token_data(rows, self.checkpoint.vocabulary)
        corpus: Corpus = as_corpus(tokens)
        rules = token_rules(self.checkpoint.tokenizer, self.checkpoint.vocabulary)
        return Reading(rules, [corpus], [tokens], self.checkpoint.tokenizer, self)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        return {"bytes_read": int(domains[0].ids.size)}


@pytest.fixture
def bytes_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts the kind in front of the list, for one test."""
    monkeypatch.setattr("sinkscope.engine.input_kinds.INPUT_KINDS", [BytesInput, *INPUT_KINDS])


@pytest.mark.usefixtures("bytes_kind")
def test_a_kind_from_outside_is_scanned(tiny_model: Any) -> None:
    given = [b"some bytes", b"more bytes", b"left aside"]
    run = sinkscope.scan(tiny_model, data={"bytes": given}, num_sequences=2)
    ids = [[FIRST + byte for byte in row] for row in given[:2]]
    expected = sinkscope.scan(tiny_model, data=ids)
    assert run.manifest.data == expected.manifest.data
    assert run.manifest.self_check.status == "passed"
    pd.testing.assert_frame_equal(run.heads, expected.heads)
    assert run.summary.more["bytes_read"] == 20


@pytest.mark.usefixtures("bytes_kind")
def test_a_kind_from_outside_refuses_in_its_own_words(tiny_model: Any) -> None:
    with pytest.raises(SinkscopeError, match="list of byte strings"):
        sinkscope.scan(tiny_model, data={"bytes": [b"some bytes", "a text"]})
    with pytest.raises(SinkscopeError, match="list of byte strings"):
        sinkscope.scan("./no-such-model", data={"bytes": []})


def test_without_the_kind_its_request_is_refused(tiny_model: Any) -> None:
    with pytest.raises(SinkscopeError, match="a SPEC, a list of them, or token ids"):
        sinkscope.scan(tiny_model, data={"bytes": [b"some bytes"]})


PIXELS = {"pixel_values": torch.zeros(1, 3, 32, 32)}
ASKED: dict[str, Asked] = {
    "text": Asked(),
    "text ": Asked(specs=("prose", "code")),
    "the model's own task": Asked(specs=("trigger",)),
    "token ids": Asked(given=[[3, 4]]),
    "signals": Asked(given=PIXELS),
    "signals ": Asked(images="folder"),
    "signals with text": Asked(given=PIXELS | {"input_ids": [[3, 4]]}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_request_asks_for_one_kind(name: str) -> None:
    assert kind_asked_for(ASKED[name]).name == name.strip()


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(specs=("wikipedia",)), "unknown data 'wikipedia'"),
        (Asked(specs=("trigger", "wikipedia")), "unknown data 'wikipedia'"),
        (Asked(specs=("absent.txt",)), "no such data file"),
        (Asked(given=7), "token ids"),
        (Asked(given=[[3, 4.5]]), "token ids"),
        (Asked(given={"input_ids": [[3, 4]], "attention_mask": [[1]]}), "differ in shape"),
        (Asked(given={"pixel_values": torch.zeros(3, 32, 32)}), r"shape \[picture"),
        (Asked(given={"input_values": torch.full((1, 64), torch.nan)}), "NaN"),
        (Asked(given=PIXELS, seq_len=64), "--seq-len"),
        (Asked(given=PIXELS | {"input_ids": [[3, 4]]}, seq_len=64), "--seq-len"),
        (Asked(given=PIXELS | {"input_ids": [[3]]}), "at least 2 tokens"),
        (Asked(images="no-such-folder"), "no such folder"),
        (Asked(audio="no-such-folder"), "no such folder"),
    ],
)
def test_what_no_model_can_read_is_refused_before_one_is_loaded(asked: Asked, words: str) -> None:
    with pytest.raises(SinkscopeError, match=words):
        check_asked(asked)


def test_ids_that_can_be_read_once_are_read_once(tiny_model: Any) -> None:
    rows = [list(range(3, 20)), list(range(4, 21))]
    once = sinkscope.scan(tiny_model, data=(iter(row) for row in rows), self_check=False)
    assert once.manifest.data == sinkscope.scan(tiny_model, data=rows, self_check=False).manifest.data


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Asked(), "reads pixel_values, not token ids"),
        (Asked(given=[[3, 4]]), "give --images FOLDER"),
        (Asked(given={"input_values": torch.zeros(1, 64)}), "takes no sound"),
    ],
)
def test_a_model_of_pictures_says_what_it_reads(asked: Asked, words: str) -> None:
    checkpoint = wrap_model(tiny_model(AutoModel, "vit"))
    with pytest.raises(SinkscopeError, match=words):
        claim(asked, checkpoint, Forward(checkpoint.model))


def test_given_ids_keep_the_fingerprint_of_what_was_cut(tiny_model: Any) -> None:
    """A row read in part is the same document as the whole row in a file."""
    checkpoint = wrap_model(tiny_model)
    rows = torch.randint(FIRST, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(0))
    both = [
        claim(asked, checkpoint, Forward(checkpoint.model)).read(1).corpora[0]
        for asked in (Asked(given=rows, seq_len=16, num_sequences=2), Asked(given=rows))
    ]
    assert both[0].ids.shape == (2, 16)
    assert both[0].passages == both[1].passages[:2]
