"""Text and ids that give no sequence: each says what is missing."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import VOCABULARY, Refused, make_tokenizer
from tokenizers import Tokenizer, models, processors
from transformers import PreTrainedTokenizerFast

from sinkscope import SinkscopeError
from sinkscope.checkpoints.tokenizers import language_and_task
from sinkscope.inputs import read_corpus, token_rules
from sinkscope.inputs.batches import TokenData, batches, token_data
from sinkscope.inputs.corpus import NothingLeft
from sinkscope.inputs.rules import encode


def read(spec: object, tokenizer: Any, seq_len: int = 16, **kwargs: Any) -> Any:
    return read_corpus(str(spec), tokenizer, token_rules(tokenizer, VOCABULARY), seq_len, 4, **kwargs)


@pytest.fixture
def without_bos() -> Any:
    tokenizer = make_tokenizer()
    tokenizer.bos_token = None
    return tokenizer


@pytest.mark.parametrize("spec", ["random", "prose"])
def test_bos_always_needs_a_bos_token(spec: str, without_bos: Any) -> None:
    with pytest.raises(SinkscopeError, match="--bos always: the tokenizer has no BOS token"):
        read(spec, without_bos, bos="always")


def test_a_mode_of_bos_that_there_is_not(tokenizer: Any) -> None:
    with pytest.raises(SinkscopeError, match="--bos 'sometimes': choose one of auto, always, never"):
        read("prose", tokenizer, bos="sometimes")


def test_special_tokens_alone_are_no_sequence(tokenizer: Any) -> None:
    with pytest.raises(SinkscopeError, match="--seq-len 1 leaves no room beside 1 special tokens"):
        read("prose", tokenizer, seq_len=1)


def test_synthetic_data_of_which_nothing_is_left(tokenizer: Any) -> None:
    """`repeated` has as many sequences as the vocabulary has ordinary tokens."""
    rules = token_rules(tokenizer, 6)
    passages = [piece for corpus in (read_corpus("repeated", tokenizer, rules, 4, 99),) for piece in corpus.passages]
    left_out = {passage for each in passages for passage in each}
    with pytest.raises(NothingLeft, match="every sequence that the seed gives is left out; give another --seed"):
        read_corpus("repeated", tokenizer, rules, 4, 1, without=left_out)


def test_text_that_packs_many_letters_into_a_token(tmp_path: Path) -> None:
    """A first guess at the length of the text needed falls short."""
    tokenizer, word = make_tokenizer(), "abcdefghij" * 5
    tokenizer.add_tokens([word])
    text = f"{word} " * 100
    path = tmp_path / "x.txt"
    path.write_text(text, "utf-8")
    corpus = read_corpus(str(path), tokenizer, token_rules(tokenizer, VOCABULARY + 1), 16, 2, bos="never")
    assert corpus.ids.ravel().tolist() == tokenizer(text, add_special_tokens=False)["input_ids"][:32]
    assert (corpus.ids == VOCABULARY).sum() == 16


def test_a_field_of_plain_text(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "x.txt").write_text("words", "utf-8")
    with pytest.raises(SinkscopeError, match=r"x\.txt is plain text and has no field 'text'"):
        read(f"{tmp_path / 'x.txt'}#text", tokenizer)


def test_a_file_that_the_disk_cannot_read(tmp_path: Path, tiny_folder: Path, refused: Refused) -> None:
    (tmp_path / "x.txt").symlink_to("/proc/self/mem")
    if not (tmp_path / "x.txt").is_file():
        pytest.skip("this system has no /proc")
    assert refused(tiny_folder, "--data", tmp_path / "x.txt") == f"cannot read {tmp_path / 'x.txt'}: Input/output error"


def test_rows_of_the_hub_are_streamed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package is a stand-in: it gives endless rows, as streaming does, or its own error."""
    asked: list[Any] = []

    def load_dataset(name: str, config: str | None, split: str, streaming: bool) -> Any:
        asked.append((name, config, split, streaming))
        if name == "none":
            raise ConnectionError("no such dataset\nand much more")
        return iter(lambda: {"words": "one row of words " * 20, "number": 1}, None)

    package = ModuleType("datasets")
    monkeypatch.setattr(package, "load_dataset", load_dataset, raising=False)
    monkeypatch.setitem(sys.modules, "datasets", package)
    corpus = read("hf:allenai/c4:en/train#words", tokenizer)
    assert corpus.ids.shape == (4, 16)
    assert asked == [("allenai/c4", "en", "train", True)]
    assert all(name.startswith("allenai/c4/train:") for name in corpus.documents)
    with pytest.raises(SinkscopeError, match="field 'number' is neither text"):
        read("hf:allenai/c4:en/train#number", tokenizer)
    with pytest.raises(SinkscopeError, match=r"^cannot read dataset 'none': no such dataset$"):
        read("hf:none/train#text", tokenizer)


def test_sequences_with_extras_come_one_at_a_time() -> None:
    ids = np.arange(6).reshape(3, 2)
    data = TokenData(ids, extras=[{"extra": torch.tensor([[number]])} for number in range(3)])
    found = list(batches(data, 1, 2, torch.device("cpu")))
    assert [batch.inputs.tolist() for batch in found] == [[[2, 3]], [[4, 5]]]
    assert [batch.extra["extra"].item() for batch in found] == [1, 2]


def test_signals_that_are_no_numbers() -> None:
    from families import tiny_model
    from transformers import AutoModel

    import sinkscope

    with pytest.raises(SinkscopeError, match="pixel_values: numbers of shape"):
        sinkscope.scan(tiny_model(AutoModel, "vit"), data={"pixel_values": [["a", "b"]]})


def test_rows_of_text_and_of_ids_are_not_mixed(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"text": "words"}) + "\n" + json.dumps({"input_ids": [3] * 20}) + "\n", "utf-8")
    with pytest.raises(SinkscopeError, match="mixed"):
        read(path, tokenizer)


def test_conversations_are_no_held_out_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({"messages": [{"role": "user", "content": "words"}]}) + "\n", "utf-8")
    with pytest.raises(SinkscopeError, match="holds conversations, which only a scan reads: give text here"):
        read(path, tokenizer)


def test_a_whisper_is_told_its_language_only_where_the_checkpoint_names_it(tmp_path: Path) -> None:
    """An English Whisper has a generation_config.json too, without tokens of languages."""
    file, origin = tmp_path / "generation_config.json", {"pretrained_model_name_or_path": str(tmp_path)}
    file.write_text(json.dumps({"max_length": 9}), "utf-8")
    assert language_and_task(origin) == {}
    ids = {"lang_to_id": {"<|en|>": 11}, "task_to_id": {"transcribe": 14}}
    file.write_text(json.dumps({**ids, "language": "german"}), "utf-8")
    with pytest.raises(SinkscopeError, match=r"has no id for language <\|de\|> or task transcribe"):
        language_and_task(origin)
    file.write_text(json.dumps({**ids, "task": "translate"}), "utf-8")
    with pytest.raises(SinkscopeError, match=r"has no id for language <\|en\|> or task translate"):
        language_and_task(origin)


def test_a_tokenizer_that_fails_is_named() -> None:
    class Broken:
        def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
            raise TypeError("'>' not supported between instances of 'int' and 'dict'\nmore")

    with pytest.raises(
        SinkscopeError, match=r"^the checkpoint's tokenizer, Broken, fails on text \('>' not .*'dict'\)"
    ):
        encode(Broken(), "text", special=False)


@pytest.mark.parametrize("name", ["token_type_ids", "bbox"])
def test_what_a_scan_would_not_give_the_model_is_refused(name: str) -> None:
    """A scan of pairs of sentences was one of token types 0, without a word."""
    ids = [[5, 6, 7], [8, 9, 3]]
    with pytest.raises(SinkscopeError, match=f"{name}: a scan of token ids gives the model no such input"):
        token_data({"input_ids": ids, name: [[0, 0, 1], [0, 1, 1]]}, None)


def test_what_tokenizers_put_beside_ids_is_no_reason_to_refuse_them() -> None:
    ids = [[5, 6, 7], [8, 9, 3]]
    beside = {"token_type_ids": [[0] * 3] * 2, "special_tokens_mask": [[1, 0, 0]] * 2, "labels": ids, "pixels": None}
    np.testing.assert_array_equal(token_data({"input_ids": ids, **beside}, None).ids, ids)


def test_special_tokens_stand_around_a_text_of_any_alphabet() -> None:
    """A tokenizer that makes nothing of Latin letters had BOS behind every text."""
    words = {"<s>": 0, "</s>": 1, "α": 2, "β": 3, "γ": 4}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A", "</s>"], special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    greek = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    assert encode(greek, "A probe text.", False) == []
    rules = token_rules(greek, len(words))
    assert (rules.prefix, rules.suffix) == ([0], [1])


def test_a_column_that_a_parquet_file_lacks_is_not_replaced_by_another(tmp_path: Path) -> None:
    pd.DataFrame({"text": ["words of text"], "body": ["others"]}).to_parquet(tmp_path / "x.parquet")
    tokenizer = make_tokenizer()
    with pytest.raises(SinkscopeError, match=r"x\.parquet: no column 'nope'; it has body, text"):
        read_corpus(f"{tmp_path / 'x.parquet'}#nope", tokenizer, token_rules(tokenizer, VOCABULARY), 8, 1)
