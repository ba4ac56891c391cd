"""Conversations through the chat template, what the model writes after them, and how heads attend by region."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import Refused, Scan, make_model, make_tokenizer
from families import tiny_config
from models import tiny
from tiers import slow_but
from transformers import AutoModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.writing import keep_writer, written
from sinkscope.engine.measures.regions import MEASUREMENT
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import read_corpus
from sinkscope.inputs.batches import Batch
from sinkscope.inputs.chats import REGIONS, read_chats
from sinkscope.inputs.documents import read_source
from sinkscope.inputs.rules import token_rules
from sinkscope.inputs.texts import continued
from sinkscope.runs.schema.measures import MEASURED_TABLES

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]\n{% endif %}"
)
CHATS = [
    [("system", "Be brief."), ("user", "Why is the sky blue?"), ("assistant", "Air scatters blue light more.")],
    [("user", "Name a river."), ("assistant", "The Rhine."), ("user", "And the longest one, where does it end?")],
    [("user", "A very short one.")],
]


@pytest.fixture
def talker() -> Any:
    """A tokenizer with a chat template."""
    made = make_tokenizer()
    made.chat_template = TEMPLATE
    return made


@pytest.fixture
def chats(tmp_path: Path) -> str:
    return saved(tmp_path, CHATS)


def saved(folder: Path, chats: list[Any]) -> str:
    rows = [{"messages": [dict(zip(("role", "content"), message, strict=True)) for message in chat]} for chat in chats]
    path = folder / "chats.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    return str(path)


def corpus_of(spec: str, tokenizer: Any, most: int = 200) -> Any:
    return read_chats(read_source(spec), tokenizer, token_rules(tokenizer, 500), most, 5, 0)


def test_every_token_belongs_to_whom_the_template_says(chats: str, talker: Any) -> None:
    corpus = corpus_of(chats, talker)
    for row, regions, chat in zip(corpus.ids, corpus.regions, CHATS, strict=True):
        valid = row >= 0
        assert ((regions >= 0) == valid).all()
        messages = [{"role": role, "content": content} for role, content in chat]
        assert row[valid].tolist() == talker.apply_chat_template(messages)["input_ids"]
        for role in {role for role, _ in chat}:
            own = talker.decode(row[regions == REGIONS.index(role)])
            assert own.split() == " ".join(content for other, content in chat if other == role).split() or all(
                word in own for other, content in chat if other == role for word in content.split()
            )
        markers = talker.decode(row[regions == 0])
        assert markers.startswith("<s>[")
        assert not any(content in markers for _, content in chat)
    assert corpus.domain == chats
    assert corpus_of(chats, talker, 9).ids.shape == (3, 9)


def test_the_columns_against_the_model_s_own_maps(chats: str, talker: Any) -> None:
    model = make_model().double()
    run = sinkscope.scan(model, tokenizer=talker, data=chats, batch_size=2)
    corpus = corpus_of(chats, talker)
    model.set_attn_implementation("eager")
    values: dict[tuple[int, int, str], list[list[float]]] = {}
    for row, regions in zip(corpus.ids, corpus.regions, strict=True):
        length = int((row >= 0).sum())
        with torch.no_grad():
            maps = model.model(torch.tensor(row[None, :length]), output_attentions=True).attentions
        for layer, each in enumerate(maps):
            a = each[0].numpy()
            entropy = -(a * np.log(np.where(a > 0, a, 1))).sum(-1)
            marker = a[:, :, regions[:length] == 0].sum(-1)
            for region, name in enumerate(REGIONS):
                own = np.flatnonzero(regions[:length] == region)
                own = own[own > 0]
                for head in range(4) if len(own) else ():
                    row_of = (a[head, own, 0], a[head, own, own], marker[head, own], entropy[head, own])
                    values.setdefault((layer, head, name), []).append([float(x.mean()) for x in row_of])
    table = run.measured["regions"].set_index(["layer", "head", "region"])
    assert set(table.index) == set(values)
    columns = ["bos_mass", "self_mass", "marker_mass", "entropy"]
    for key, rows in values.items():
        assert table.loc[key, "sequences"] == len(rows)
        np.testing.assert_allclose(table.loc[key, columns].astype(float), np.mean(rows, 0), rtol=1e-6, atol=1e-9)
        if len(rows) > 1:
            errors = np.std(rows, 0, ddof=1) / np.sqrt(len(rows))
            np.testing.assert_allclose(
                table.loc[key, [f"{name}_sem" for name in columns]].astype(float), errors, rtol=1e-4, atol=1e-7
            )
    assert set(run.tokens["region"]) <= set(REGIONS)
    whole = sinkscope.scan(model, tokenizer=talker, data=chats, batch_size=1, self_check=False).measured["regions"]
    pd.testing.assert_frame_equal(run.measured["regions"], whole, rtol=1e-6)


@pytest.mark.parametrize("family", slow_but(["bloom", "t5"], "t5"))
def test_the_text_s_own_queries_are_read_in_other_families(family: str, chats: str, talker: Any) -> None:
    """Bloom multiplies its maps itself. T5's decoder reads the text one place later, so its queries are of nobody."""
    config = tiny_config(family)
    config.vocab_size = 500
    torch.manual_seed(0)
    model = AutoModel.from_config(config, dtype=torch.float32).eval()
    table = sinkscope.scan(model, tokenizer=talker, data=chats, batch_size=2, self_check=False).measured["regions"]
    if family == "t5":
        assert len(table) == 0
        return
    row, regions = (each[-1] for each in (corpus_of(chats, talker).ids, corpus_of(chats, talker).regions))
    alone = sinkscope.scan(
        model, tokenizer=talker, data=saved(Path(chats).parent, CHATS[-1:]), self_check=False
    ).measured["regions"]
    length = int((row >= 0).sum())
    own = np.flatnonzero(regions[:length] == REGIONS.index("user"))
    with torch.no_grad():
        maps = model(torch.tensor(row[None, :length]), output_attentions=True).attentions
    masses = torch.stack(maps)[:, 0, :, own][..., np.flatnonzero(regions[:length] == 0)].sum(-1).mean(-1)
    assert alone[alone["region"] == "user"]["marker_mass"].to_numpy() == pytest.approx(masses.ravel().numpy(), abs=1e-5)
    assert set(table["region"]) >= {"markers", "system", "user", "assistant"}


def test_a_call_whose_keys_are_not_the_tokens_has_no_markers() -> None:
    """As where a layer pools its keys: nobody knows which of them are the template's."""
    regions = np.array([[0, 2, 2, 0, 3, 3, 0, -1]])
    measure: Any = MEASUREMENT(SimpleNamespace())  # type: ignore[arg-type]
    query, key = torch.randn(1, 2, 7, 4), torch.randn(1, 2, 7, 4)
    whole, pooled = (
        AttentionCall(query[:, :, :n], key[:, :, :n], key[:, :, :n], causal=True, scaling=0.5) for n in (7, 4)
    )
    with measure.watching(Batch(0, torch.zeros(1, 8), None, None, regions=regions), regions):
        assert measure.of_call(pooled) is None
        found = measure.of_call(whole)
    logits = (query @ key.mT / 2).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(found.float(), logits.softmax(-1)[..., [0, 3, 6]].sum(-1), atol=1e-6, rtol=1e-5)


def test_what_the_model_writes_is_greedy_and_read_in_one_pass_as_it_was_decoded(talker: Any) -> None:
    """Step by step with the cache: the same tokens, and the same attention rows to 1e-5."""
    model = make_model()
    checkpoint = wrap_model(model, talker, head=True)
    keep_writer(checkpoint)
    prompt = talker("Once upon a time")["input_ids"]
    answer = written(checkpoint, prompt, 6)
    model.set_attn_implementation("eager")
    ids, rows, cache = torch.tensor([prompt]), [], None
    with torch.no_grad():
        for _ in answer:
            out = model(ids, past_key_values=cache, use_cache=True, output_attentions=True)
            cache, ids = out.past_key_values, out.logits[:, -1:].argmax(-1)
            rows.append((int(ids), [layer[0, :, -1] for layer in out.attentions]))
        whole = model(torch.tensor([[*prompt, *answer]]), output_attentions=True).attentions
    assert answer == [token for token, _ in rows]
    for step, (_, layers) in enumerate(rows):
        for decoded, prefill in zip(layers, whole, strict=True):
            place = len(prompt) - 1 + step
            torch.testing.assert_close(prefill[0, :, place, : place + 1], decoded, atol=1e-5, rtol=0)


def test_text_and_chats_go_on(chats: str, talker: Any, tiny_folder: Path) -> None:
    asked: dict[str, Any] = {"seq_len": 20, "num_sequences": 2, "generate": 4, "self_check": False}
    run = sinkscope.scan(make_model(), tokenizer=talker, data=["prose", chats], **asked)
    table = run.measured["regions"]
    generated = table[table["region"] == "generated"]
    assert set(generated["domain"]) == {"prose", chats}
    assert (generated["queries"] <= 8).all()
    assert (generated["queries"] > 0).all()
    assert [*table] == [column.name for column in MEASURED_TABLES["regions"].columns()]
    by_name = sinkscope.scan(str(tiny_folder), data="prose", **asked)
    by_object = sinkscope.scan(make_model(), tokenizer=talker, data="prose", **asked)
    assert "Special tokens get most from" in by_name.summary.streams["text"].measured["regions"]["in_words"]
    assert by_name.manifest.model.class_ == "LlamaModel"
    assert by_name.manifest.data[0].fingerprint == by_object.manifest.data[0].fingerprint
    pd.testing.assert_frame_equal(by_name.heads, by_object.heads)


def test_a_sampling_checkpoint_is_still_read_greedily(talker: Any) -> None:
    checkpoint = wrap_model(make_model(), talker, head=True)
    keep_writer(checkpoint)
    writer: Any = checkpoint.writer
    writer.generation_config.update(do_sample=True, temperature=5.0, repetition_penalty=3.0, top_k=3)
    prompt = talker("Once upon a time")["input_ids"]
    assert written(checkpoint, prompt, 5) == written(checkpoint, prompt, 5)
    assert writer.generation_config.repetition_penalty == 3.0


def test_the_command(tmp_path: Path, chats: str, talker: Any, scan_cli: Scan) -> None:
    make_model().save_pretrained(tmp_path / "model")
    talker.save_pretrained(tmp_path / "model")
    outcome = scan_cli(tmp_path / "model", "--data", f"{chats}#messages", "--generate", 3, "--no-self-check")
    assert outcome.code == 0, outcome.stderr
    assert "BOS mass by whose words the query is" in " ".join(outcome.stdout.split())
    assert "The template's markers get most from" in " ".join(outcome.stdout.split())
    run = sinkscope.load_run(outcome.folder)
    assert run.manifest.request.generate == 3
    assert set(run.measured["regions"]["region"]) >= {"markers", "user", "generated"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [([{"messages": [{"role": "wizard", "content": "x"}]}], r"role 'wizard' is none of system"),
     ([{"messages": [{"role": "user", "content": ["x"]}]}], r"message 0 \(user\): its `content` is no text"),
     ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "its `content` is no text"),
     ([{"messages": [{"role": "user", "content": "x"}]}, {"messages": []}], "field 'messages' holds no message"),
     ([{"messages": [{"content": "x"}]}], "role None is none of"),
     ([{"text": "a"}, {"messages": [{"role": "user", "content": "x"}]}], "mix conversations with texts"),
     ([{"messages": "a"}, {"messages": [{"role": "user", "content": "x"}]}], "mix conversations with texts")],
)  # fmt: skip
def test_bad_conversations(rows: list[Any], said: str | None, tmp_path: Path, talker: Any) -> None:
    (tmp_path / "bad.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(SinkscopeError, match=said):
        corpus_of(str(tmp_path / "bad.jsonl"), talker)


@pytest.mark.parametrize(
    ("template", "said"),
    [(None, "has no chat template"), ("{{ raise_exception('roles must alternate') }}", "refuses it .*must alternate"),
     ("{{ messages[0].nothing.at_all }}", "chat template refuses it"), ("{% for %}", "chat template refuses it"),
     ("{% for m in messages %}{{ m['content'] | upper }}{% endfor %}", r"not write message 0 \(user\) as it stands"),
     ("{% for m in messages %}{{ m['content'] }}{% endfor %}", r"every token is of one region \(user\)"),
     ("x", "does not write message 0")],
)  # fmt: skip
def test_bad_templates(template: str | None, said: str, tmp_path: Path, talker: Any) -> None:
    talker.chat_template = template
    with pytest.raises(SinkscopeError, match=said):
        corpus_of(saved(tmp_path, [[("user", "Good morning to you.")]]), talker)


def test_parts_of_text_are_one_text(tmp_path: Path, talker: Any) -> None:
    """As conversations of models that also see pictures are written."""
    parts = [{"type": "text", "text": text} for text in ("Why is ", "the sky blue?")]
    whole, split = (
        corpus_of(saved(tmp_path, [[("user", content)]]), talker) for content in ("Why is the sky blue?", parts)
    )
    assert split.ids.tolist() == whole.ids.tolist()
    assert split.regions.tolist() == whole.regions.tolist()


def test_a_template_that_leaves_a_single_token(tmp_path: Path, talker: Any) -> None:
    talker.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    with pytest.raises(SinkscopeError, match="the chat template makes fewer than two tokens of a conversation"):
        corpus_of(saved(tmp_path, [*CHATS, [("user", "a")]]), talker)


def test_conversations_without_a_tokenizer(chats: str) -> None:
    with pytest.raises(SinkscopeError, match="are conversations and the model has no tokenizer"):
        sinkscope.scan(make_model(), data=chats)


def test_a_tokenizer_that_does_not_place_its_tokens_in_the_text(chats: str) -> None:
    from transformers import ByT5Tokenizer

    slow = ByT5Tokenizer()
    slow.chat_template = TEMPLATE
    with pytest.raises(SinkscopeError, match="ByT5Tokenizer does not say which characters a token stands for"):
        corpus_of(chats, slow)


def test_a_doubled_bos_is_said(tmp_path: Path, talker: Any) -> None:
    talker.chat_template = "{{ bos_token }}" + TEMPLATE
    corpus = corpus_of(saved(tmp_path, CHATS), talker)
    assert any("BOS stands twice" in warning for warning in corpus.warnings)


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--generate", 0), "--generate 0: at least 1"), (("--generate", 10**7), "at most"),
     (("--generate", 600), "positions")],
)  # fmt: skip
def test_bad_numbers(words: tuple[object, ...], said: str, tiny_folder: Path, refused: Refused) -> None:
    assert said in refused(tiny_folder, *words)


def test_a_model_that_writes_nothing(tokenizer: Any) -> None:
    with pytest.raises(SinkscopeError, match="without a next-token head it predicts no text"):
        sinkscope.scan(tiny("bert"), tokenizer=tokenizer, data="prose", generate=3)
    with pytest.raises(SinkscopeError, match=r"--generate goes on after text"):
        sinkscope.scan(make_model(), data=[[1, 2, 3]], generate=3)


def test_a_model_that_ends_at_once(talker: Any) -> None:
    rules = token_rules(talker, 500)
    corpus = read_corpus("prose", talker, rules, 8, 2)
    with pytest.raises(SinkscopeError, match="--generate: the model ends at once after every sequence of prose"):
        continued(corpus, rules, lambda prompt: [])


class HeadForCausalLM(PreTrainedModel):
    """A checkpoint's own class with a next-token head, but without transformers' generate."""

    def __init__(self) -> None:
        super().__init__(LlamaConfig())
        self.head = torch.nn.Linear(4, 8)


def test_a_head_without_generate_writes_nothing() -> None:
    checkpoint = wrap_model(HeadForCausalLM().eval(), head=True)
    with pytest.raises(SinkscopeError, match=r"--generate: HeadForCausalLM .*writes no text"):
        keep_writer(checkpoint)


@pytest.mark.parametrize(
    ("error", "said"),
    [(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."), "out of memory in the writing of 3"),
     (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: 9"), "out of memory in the writing"),
     (MemoryError(), "out of memory in the writing of 3 tokens after"),
     (TypeError("no cache\nhere"), "--generate: LlamaForCausalLM cannot go on writing: no cache")],
)  # fmt: skip
def test_a_model_that_cannot_go_on(
    error: Exception, said: str, tiny_folder: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generate(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(LlamaForCausalLM, "generate", generate)
    assert refused(tiny_folder, "--generate", 3).startswith(said)


def test_conversations_go_to_a_scan_alone(chats: str, talker: Any) -> None:
    for asked in ({"bos": "never"}, {"first": "bos"}):
        with pytest.raises(SinkscopeError):
            sinkscope.scan(make_model(), tokenizer=talker, data=chats, **asked)
