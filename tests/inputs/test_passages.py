"""Held-out text: documents already read are left out by content, not by name; windows by shared tokens."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import VOCABULARY, corpus_texts

from sinkscope.inputs import Corpus, NothingLeft, Passage, read_corpus, token_rules
from sinkscope.inputs.batches import as_corpus, token_data

Read = Callable[..., Corpus]
TEXTS = [f"{word} " * 40 + "and no more" for word in ("rivers", "mountains", "valleys", "deserts", "glaciers", "caves")]


@pytest.fixture
def read(tokenizer: Any) -> Read:
    """read_corpus with the tiny tokenizer."""

    def call(spec: object, seq_len: int = 32, num_sequences: int = 99, **kwargs: Any) -> Corpus:
        rules = token_rules(tokenizer, VOCABULARY)
        return read_corpus(str(spec), tokenizer, rules, seq_len, num_sequences, **kwargs)

    return call


def write_lines(path: Path, rows: list[Any], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({field: row}) + "\n" for row in rows), "utf-8")
    return path


def read_of(corpus: Corpus) -> list[Passage]:
    """All that the corpus has read."""
    return [passage for own in corpus.passages for passage in own]


def test_a_passage_is_the_document_s_hash(read: Read, tmp_path: Path) -> None:
    corpus = read(write_lines(tmp_path / "x.jsonl", TEXTS))
    assert [own[0].document for own in corpus.passages] == [hashlib.sha256(t.encode()).hexdigest() for t in TEXTS]
    assert corpus.pieces == [(f"x.jsonl:{number}",) for number in range(1, 7)]


def test_the_same_documents_under_other_names_are_left_out(read: Read, tmp_path: Path) -> None:
    first = read(write_lines(tmp_path / "x.jsonl", TEXTS[:4]))
    other = read(write_lines(tmp_path / "y.jsonl", [TEXTS[5], TEXTS[2], TEXTS[4], TEXTS[2]]), without=read_of(first))
    assert other.documents == ["y.jsonl:1", "y.jsonl:3"]


def test_a_name_that_looks_like_two_is_one(read: Read, tmp_path: Path) -> None:
    """`a + b.jsonl` is a file name, and one of two documents joined is left out alone as well."""
    path = write_lines(tmp_path / "a + b.jsonl", TEXTS)
    some = read(path, num_sequences=3)
    rest = read(path, without=read_of(some))
    assert some.pieces == [(name,) for name in some.documents]
    assert len(rest.ids) == 3
    assert not set(some.documents) & set(rest.documents)


def test_every_document_of_a_joined_sequence_is_left_out(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", TEXTS)
    longest = max(len(tokenizer(text)["input_ids"]) for text in TEXTS)
    joined = read(path, longest + 1, 1)
    assert joined.joined == 1
    assert len(joined.pieces[0]) == len(joined.passages[0]) == 2
    rest = read(path, without=read_of(joined))
    assert set(rest.documents) == {f"x.jsonl:{number}" for number in range(1, 7)} - set(joined.pieces[0])


@pytest.mark.parametrize(("length", "bos"), [(32, "auto"), (32, "never"), (20, "auto"), (75, "always")])
def test_windows_of_any_length_share_no_token_with_those_read(
    length: int, bos: str, read: Read, tokenizer: Any, tmp_path: Path
) -> None:
    """Also where special tokens or another length move the windows' edges, and under another file name."""
    text = "".join(corpus_texts("prose")[:3])
    for name in ("book.txt", "copy.txt"):
        (tmp_path / name).write_text(text, "utf-8")
    corpus = read(tmp_path / "book.txt", 32, 5, bos="auto")
    rest = read(tmp_path / "copy.txt", length, 4, bos=bos, without=read_of(corpus))
    assert len(rest.ids) == 4
    ids, special = tokenizer(text, add_special_tokens=False)["input_ids"], 0 if bos == "never" else 1
    for row, (passage,) in zip(rest.ids, rest.passages, strict=True):
        assert passage.start >= 5 * 31
        assert row[special:].tolist() == ids[passage.start : passage.stop]
    assert min(passage.start for passage in read_of(rest)) < 5 * 31 + length  # no more than the shared window is lost


def test_windows_between_passages_are_read(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text(corpus_texts("prose")[0] * 2, "utf-8")
    windows = read(path, 32, 6)
    rest = read(path, 32, 3, without=read_of(windows)[1::2])
    assert rest.documents == [windows.documents[0], windows.documents[2], windows.documents[4]]


def test_a_document_read_is_not_read_in_windows(read: Read, tmp_path: Path) -> None:
    text = corpus_texts("prose")[0]
    path = tmp_path / "book.txt"
    path.write_text(text, "utf-8")
    document = read(write_lines(tmp_path / "x.jsonl", [text]))
    with pytest.raises(NothingLeft):
        read(path, without=read_of(document))
    window = read(path, 32, 1)
    with pytest.raises(NothingLeft):
        read(tmp_path / "x.jsonl", without=read_of(window))


def test_passages_survive_json(read: Read) -> None:
    passages = read_of(read("prose", num_sequences=3))
    assert [Passage(*row) for row in json.loads(json.dumps(passages))] == passages


def test_token_ids_are_left_out_by_content(read: Read, tmp_path: Path) -> None:
    rows = [list(range(start, start + 40)) for start in range(10, 14)]
    given = as_corpus(token_data([rows[1], rows[3][:39]], VOCABULARY))
    rest = read(write_lines(tmp_path / "x.jsonl", rows, "input_ids"), without=read_of(given))
    assert rest.documents == ["x.jsonl:1", "x.jsonl:3", "x.jsonl:4"]


def test_lone_halves_of_surrogate_pairs_have_a_fingerprint() -> None:
    from sinkscope.inputs.documents import Document

    assert len(Document("x", text="some \ud800 text").passage.document) == 64


@pytest.mark.parametrize("spec", ["random", "repeated"])
def test_synthetic_sequences_are_drawn_anew(spec: str, read: Read) -> None:
    """The same seed gives the sequences that follow those read; another first token does not hide them."""
    some = read(spec, num_sequences=5)
    more = read(spec, num_sequences=10)
    assert np.array_equal(more.ids[:5], some.ids)
    rest = read(spec, num_sequences=5, bos="always", without=read_of(some))
    fresh = {tuple(row) for row in rest.ids[:, 1:].tolist()}
    assert len(rest.ids) == 5
    assert not fresh & {tuple(row) for row in some.ids[:, 1:].tolist()}
    assert fresh <= {tuple(row) for row in read(spec, num_sequences=40).ids[:, 1:].tolist()}


def test_nothing_left_is_an_error_of_its_own(read: Read, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", TEXTS)
    with pytest.raises(NothingLeft, match="all 6 documents are left out"):
        read(path, without=read_of(read(path)))
    with pytest.raises(NothingLeft, match="too short"):
        read(path, 500, without=read_of(read(path, num_sequences=4)))
