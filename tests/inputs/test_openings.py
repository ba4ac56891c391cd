"""How sequences begin under --first and --prepend: the same text after another opening."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiers import slow_but

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.corpus import same_documents
from sinkscope.inputs.openings import opening_tokens, read_opened
from sinkscope.inputs.rules import TokenRules, token_rules
from sinkscope.runs.openings import MOST_REPEATS, Opening, check_opening, openings

LENGTH, COUNT = 24, 5
EVERY = [Opening(first, prepend) for first in ("auto", "bos", "bosx4", "none", "random", "a") for prepend in (0, 3)]


@pytest.fixture(scope="module")
def rules(tokenizer: Any) -> TokenRules:
    return token_rules(tokenizer, 500)


@pytest.mark.parametrize("spec", slow_but(["prose", "random", "repeated", "long.txt"], "prose", "long.txt"))
def test_the_same_text_follows_every_opening(spec: str, tokenizer: Any, rules: TokenRules, tmp_path: Path) -> None:
    if spec == "long.txt":
        (tmp_path / spec).write_text("The old mill stood by the river, and nobody came. " * 40, "utf-8")
        spec = str(tmp_path / spec)
    corpora = read_opened(spec, tokenizer, rules, LENGTH, COUNT, EVERY, seed=3)
    widths = [(first + prepend) for first in (1, 1, 4, 0, 1, 1) for prepend in (0, 3)]
    text = corpora[6].ids  # nothing stands before it
    for corpus, width in zip(corpora, widths, strict=True):
        assert corpus.ids.shape == (COUNT, LENGTH)
        assert np.array_equal(corpus.ids[:, width:], text[:, : LENGTH - width])
        assert same_documents(corpus, corpora[0], COUNT)
        assert all("windows of one text" in warning for warning in corpus.warnings)
        assert bool(corpus.warnings) == spec.endswith("txt")
    assert len({corpus.domain for corpus in corpora}) == len(EVERY)
    assert (corpora[4].ids[:, :4] == rules.bos_id).all()
    assert (corpora[5].ids[:, 3:7] == rules.bos_id).all()
    before = corpora[1].ids[:, :3]
    assert all(np.array_equal(corpus.ids[:, :3], before) for corpus in corpora[1::2])
    assert not np.isin(before, list(rules.special)).any()
    drawn = corpora[8].ids[:, 0]
    assert not np.isin(drawn, list(rules.special)).any()
    assert len(np.unique(drawn)) > 1
    assert (corpora[10].ids[:, 0] == tokenizer.convert_tokens_to_ids("a")).all()


def test_the_tokenizer_s_own_ending_stays(tokenizer: Any, rules: TokenRules) -> None:
    ending = TokenRules([0], [1, 2], 0, rules.special, rules.vocabulary, rules.drawable)
    for corpus in read_opened("prose", tokenizer, ending, LENGTH, 2, EVERY):
        assert (corpus.ids[:, -2:] == [1, 2]).all()


def test_domains_are_named_by_what_differs() -> None:
    assert Opening("bos", 8).named((True, True)) == " first=bos prepend=8"
    assert Opening("bosx4", 8).named((True, False)) == " first=bosx4"
    assert Opening("a b").named((True, False)) == " first='a b'"
    assert Opening("bos", 8).named((False, False)) == ""
    assert openings((), (0, 8)) == [Opening("auto", 0), Opening("auto", 8)]
    assert openings(("none", "bos"), ()) == [Opening("none"), Opening("bos")]


@pytest.mark.parametrize(
    ("opening", "said"),
    [(Opening(""), "--first '': give one of"), (Opening("bosx0"), "1 to 64 times"),
     (Opening(f"bosx{MOST_REPEATS + 1}"), "1 to 64 times"), (Opening("bos", -1), "--prepend -1: a number")],
)  # fmt: skip
def test_what_no_tokenizer_can_read(opening: Opening, said: str) -> None:
    with pytest.raises(SinkscopeError, match=said):
        check_opening(opening)


@pytest.mark.parametrize(
    ("first", "said"),
    [("several words", r"--first 'several words': the tokenizer makes \d+ tokens of it \("), ("\\n\\n\\n\\t", "makes")],
)
def test_a_text_of_several_tokens_is_refused(first: str, said: str, tokenizer: Any, rules: TokenRules) -> None:
    with pytest.raises(SinkscopeError, match=said):
        opening_tokens(Opening(first), tokenizer, rules, 2, 0)


def test_a_token_may_be_spelled_as_the_vocabulary_does(tokenizer: Any, rules: TokenRules) -> None:
    assert opening_tokens(Opening("</s>"), tokenizer, rules, 2, 0).tolist() == [[1], [1]]
    assert opening_tokens(Opening("\\n"), tokenizer, rules, 1, 0).tolist() == [tokenizer.encode("\n")[1:]]
    spelled = tokenizer.convert_ids_to_tokens(tokenizer.encode(" the")[1])
    assert len(tokenizer.encode(spelled)) > 2
    assert opening_tokens(Opening(spelled), tokenizer, rules, 1, 0).tolist() == [tokenizer.encode(" the")[1:]]


def test_without_a_bos_or_a_tokenizer(tokenizer: Any, rules: TokenRules) -> None:
    without = TokenRules([], [], None, frozenset(), 500, 500)
    with pytest.raises(SinkscopeError, match="--first bosx2: the tokenizer has no BOS token"):
        opening_tokens(Opening("bosx2"), tokenizer, without, 2, 0)
    with pytest.raises(SinkscopeError, match="--first 'x': the model has no tokenizer"):
        opening_tokens(Opening("x"), None, without, 2, 0)
    special = TokenRules([], [], 0, frozenset(range(500)), 500, 500)
    with pytest.raises(SinkscopeError, match="special tokens only"):
        opening_tokens(Opening("random"), tokenizer, special, 2, 0)


def test_data_that_begin_as_they_do(tokenizer: Any, rules: TokenRules, tmp_path: Path) -> None:
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [5, 6, 7, 8]}\n')
    with pytest.raises(SinkscopeError, match="holds no text"):
        read_opened(str(tmp_path / "ids.jsonl"), tokenizer, rules, 4, 2, [Opening("none")])
    with pytest.raises(SinkscopeError, match=r"--seq-len 8 leaves no room for text beside the 8 tokens"):
        read_opened("prose", tokenizer, rules, 8, 2, [Opening("none"), Opening("bos", 7)])
    for prepended in (8, 10**12):  # the second is more than any memory holds
        with pytest.raises(SinkscopeError, match=rf"--seq-len 8 leaves no room for text beside the {prepended} tokens"):
            read_opened("prose", tokenizer, rules, 8, 2, [Opening("none", prepended)])
    (tmp_path / "short.txt").write_text("a few words")
    with pytest.raises(SinkscopeError, match="too short"):
        read_opened(str(tmp_path / "short.txt"), tokenizer, rules, 60, 2, [Opening("none")])
