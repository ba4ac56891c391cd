"""Kinds of input: a kind added from outside the package, and which kind reads which request."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import pytest
import torch
from conftest import VOCABULARY, make_model
from families import tiny_model
from transformers import AutoModel

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.capture import Site
from sinkscope.checkpoints import wrap_model
from sinkscope.engine.input_kinds import INPUT_KINDS, InputKind, Reading, check_asked, claim, kind_asked_for
from sinkscope.inputs import Corpus, token_rules
from sinkscope.inputs.batches import TokenData, as_corpus, token_data
from sinkscope.inputs.documents import as_texts
from sinkscope.runs.request import Request, make_request
from sinkscope.tables.values import Domain

FIRST = 3
"""The token id that stands for byte 0 in the made-up model's vocabulary."""


class BytesInput(InputKind):
    """{"bytes": [...]}: every byte a token, counted from FIRST on."""

    name: ClassVar[str] = "bytes"

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return isinstance(request.handed, dict) and "bytes" in request.handed

    @classmethod
    def check(cls, request: Request) -> None:
        rows = request.handed["bytes"]
        if not rows or any(not isinstance(row, bytes) or len(row) < 2 for row in rows):
            raise SinkscopeError("bytes: a list of byte strings, each of at least 2, is needed")

    def read(self, positions: int) -> Reading:
        rows = [[FIRST + byte for byte in row] for row in self.request.handed["bytes"][: self.request.num_sequences]]
        tokens: TokenData = token_data(rows, self.checkpoint.vocabulary)
        corpus: Corpus = as_corpus(tokens)
        rules = token_rules(self.checkpoint.tokenizer, self.checkpoint.vocabulary)
        return Reading(rules, [corpus], [tokens], self.checkpoint.tokenizer, self)

    def summary(self, domains: list[Domain], sites: list[Site], positions: pd.DataFrame) -> dict[str, Any]:
        return {"bytes_read": int(domains[0].ids.size)}


@pytest.fixture
def bytes_kind() -> Iterator[None]:
    """Declares the kind for one test."""
    INPUT_KINDS.add("bytes", BytesInput)
    yield
    INPUT_KINDS.remove("bytes")


def wanted(given: Any = None, specs: tuple[str, ...] | None = None, **settings: Any) -> Request:
    """A request for data handed over in Python, or for SPECs."""
    kind = None if given is None else "an object"
    return make_request(model="m", data=specs, given=kind, **settings).reading(given)


class Unread(InputKind):
    """Lacks `read`."""

    name: ClassVar[str] = "unread"

    @classmethod
    def asked_for(cls, request: Request) -> bool:
        return False


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (f"{__name__}:Unread", "is not complete"), (f"{__name__}:wanted", "is not a subclass of InputKind"),
        ("absent_module:Kind", "does not load: No module named 'absent_module'"),
    ],
)  # fmt: skip
def test_a_package_s_kind_that_is_none_is_named_and_left_out(
    kind: str, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It ended every scan. What sinkscope itself reads is read as ever; what it does not read is refused."""
    monkeypatch.syspath_prepend(str(tmp_path))  # a warning is given once for each path
    entry = EntryPoint("mine", kind, str(INPUT_KINDS.group))
    installed = {INPUT_KINDS.group: {"mine": [entry]}}
    monkeypatch.setattr("sinkscope.lookup._entries", lambda group, paths: installed.get(group, {}))
    with pytest.warns(UserWarning, match=f"^kind of input mine: .* {said}.*; it is left out$"):
        assert kind_asked_for(wanted(specs=("prose",))).name == "text"
    check_asked(wanted(specs=("prose",)))
    with pytest.raises(SinkscopeError, match="a SPEC, a list of them, or token ids"):
        check_asked(wanted(given={"bytes": [b"some bytes"]}))


def failing(at: str) -> type[InputKind]:
    """A kind whose method of this name fails."""

    def fail(*_: Any) -> Any:
        raise ValueError("no bytes today")

    return type("Failing", (BytesInput,), {at: fail if at in ("probe", "read", "summary") else classmethod(fail)})


@pytest.mark.parametrize("at", ["asked_for", "claims", "check", "probe", "read", "summary"])
def test_a_kind_from_outside_that_fails_is_named(at: str, tiny_model: Any) -> None:
    INPUT_KINDS.add("bytes", failing(at), "a package")
    try:
        with pytest.raises(SinkscopeError, match=r"^kind of input bytes: a package fails: no bytes today$"):
            sinkscope.scan(tiny_model, data={"bytes": [b"some bytes", b"more bytes"]}, self_check=False)
    finally:
        INPUT_KINDS.remove("bytes")


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
ASKED: dict[str, Request] = {
    "text": wanted(),
    "text ": wanted(specs=("prose", "code")),
    "the model's own task": wanted(specs=("trigger",)),
    "token ids": wanted(given=[[3, 4]]),
    "signals": wanted(given=PIXELS),
    "signals ": wanted(images="folder"),
    "signals with text": wanted(given=PIXELS | {"input_ids": [[3, 4]]}),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_request_asks_for_one_kind(name: str) -> None:
    assert kind_asked_for(ASKED[name]).name == name.strip()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (wanted(specs=("wikipedia",)), "unknown data 'wikipedia'"),
        (wanted(specs=("trigger", "wikipedia")), "unknown data 'wikipedia'"),
        (wanted(specs=("absent.txt",)), "no such data file"),
        (wanted(given=7), "token ids"),
        (wanted(given=[[3, 4.5]]), "token ids"),
        (wanted(given={"input_ids": [[3, 4]], "attention_mask": [[1]]}), "differ in shape"),
        (wanted(given={"pixel_values": torch.zeros(3, 32, 32)}), r"shape \[picture"),
        (wanted(given={"input_values": torch.full((1, 64), torch.nan)}), "NaN"),
        (wanted(given=PIXELS, seq_len=64), "--seq-len"),
        (wanted(given=PIXELS | {"input_ids": [[3, 4]]}, seq_len=64), "--seq-len"),
        (wanted(given=PIXELS | {"input_ids": [[3]]}), "at least 2 tokens"),
        (wanted(images="no-such-folder"), "no such folder"),
        (wanted(audio="no-such-folder"), "no such folder"),
    ],
)
def test_what_no_model_can_read_is_refused_before_one_is_loaded(request_: Request, words: str) -> None:
    with pytest.raises(SinkscopeError, match=words):
        check_asked(request_)


def test_ids_that_can_be_read_once_are_read_once(tiny_model: Any) -> None:
    rows = [list(range(3, 20)), list(range(4, 21))]
    once = sinkscope.scan(tiny_model, data=(iter(row) for row in rows), self_check=False)
    assert once.manifest.data == sinkscope.scan(tiny_model, data=rows, self_check=False).manifest.data


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (wanted(), "reads pixel_values, not token ids"),
        (wanted(given=[[3, 4]]), "give --images FOLDER"),
        (wanted(given={"input_values": torch.zeros(1, 64)}), "takes no sound"),
    ],
)
def test_a_model_of_pictures_says_what_it_reads(request_: Request, words: str) -> None:
    checkpoint = wrap_model(tiny_model(AutoModel, "vit"))
    with pytest.raises(SinkscopeError, match=words):
        claim(request_, checkpoint)


def test_given_ids_keep_the_fingerprint_of_what_was_cut(tiny_model: Any) -> None:
    """A row read in part is the same document as the whole row in a file."""
    checkpoint = wrap_model(tiny_model)
    rows = torch.randint(FIRST, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(0))
    both = [
        claim(request_, checkpoint).read(1).corpora[0]
        for request_ in (wanted(given=rows, seq_len=16, num_sequences=2), wanted(given=rows))
    ]
    assert both[0].ids.shape == (2, 16)
    assert both[0].passages == both[1].passages[:2]


@pytest.mark.slow
def test_a_model_that_fails_on_text_alone_says_what_to_give_with_it() -> None:
    advice = "it takes pixel_values, too: give --images FOLDER, or what its processor returns, in Python"
    with pytest.raises(SinkscopeError, match=rf"^CLIPModel cannot be run on its main input alone: .*; {advice}$"):
        sinkscope.scan(tiny_model(AutoModel, "clip"), data=torch.ones(2, 8, dtype=torch.long), self_check=False)


def test_a_list_of_texts_is_read_as_texts(tiny_model: Any, tokenizer: Any) -> None:
    """The tokens are those of a file with the same texts: a document each, the short ones joined."""
    texts = ["the ferry bell rang twice before the rope was loose", "and the old man on the pier lifted his hat"] * 4
    asked = {"tokenizer": tokenizer, "seq_len": 12, "num_sequences": 4, "self_check": False}
    run = sinkscope.scan(tiny_model, data=texts, **asked)
    (data,) = run.manifest.data
    assert (data.domain, data.sequences, data.seq_len) == ("texts", 4, 12)
    assert run.manifest.request.given == "texts"
    assert set(data.documents) <= {f"text {number}" for number in range(8)} | {
        f"text {number} + text {number + 1}" for number in range(8)
    }
    modes = sinkscope.scan(tiny_model, data=texts, bos=["auto", "never"], **asked)
    assert [each.domain for each in modes.manifest.data] == ["texts bos=auto", "texts bos=never"]
    with pytest.raises(SinkscopeError, match="generate="):
        sinkscope.scan(tiny_model, data=texts, generate=2, **asked)


def test_text_is_as_long_as_a_model_of_few_positions_reads(tokenizer: Any) -> None:
    model, asked = make_model(max_position_embeddings=40), {"num_sequences": 2, "self_check": False}
    for data in ("prose", "random", ["the ferry bell rang twice before the rope was loose"] * 20):
        run = sinkscope.scan(model, data=data, tokenizer=tokenizer, **asked)
        assert [each.seq_len for each in run.manifest.data] == [40]
        assert run.manifest.request.seq_len is None
    with pytest.raises(SinkscopeError, match="--seq-len 41 exceeds the 40 positions"):
        sinkscope.scan(model, data="prose", tokenizer=tokenizer, seq_len=41, **asked)
    assert sinkscope.dry_run(model, num_sequences=2).seq_len == 40
    measured = sinkscope.arms(model, ["keys:first1"], tokenizer=tokenizer, num_sequences=2, draws=2)
    assert measured.facts["data"]["seq_len"] == 40


@pytest.mark.parametrize("mode", ["always", "never"])
def test_no_bos_is_asked_of_given_ids(mode: str, tiny_model: Any) -> None:
    with pytest.raises(SinkscopeError, match=f"bos='{mode}': token ids are read unchanged"):
        sinkscope.scan(tiny_model, data=[[0, 5, 6], [0, 7, 8]], bos=mode, self_check=False)


def test_no_bos_is_asked_of_pictures() -> None:
    with pytest.raises(SinkscopeError, match="--bos chooses how text begins"):
        sinkscope.scan(tiny_model(AutoModel, "vit"), data={"pixel_values": torch.zeros(2, 3, 32, 32)}, bos="never")


@pytest.mark.parametrize("data", [["prose", "code"], ["my file.txt"], ["hf:a/b c#text"], ["nonesuch"], "one text"])
def test_names_of_data_are_no_texts(data: Any) -> None:
    assert as_texts(data) is None
