"""Conversations through the chat template, what the model writes after them, and how heads attend by region."""

from __future__ import annotations

import json
import re
import sys
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
from writers import CACHE

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import keep_writer, written
from sinkscope.errors import SinkscopeError
from sinkscope.inputs import read_corpus
from sinkscope.inputs.batches import Batch
from sinkscope.inputs.chats import REGIONS, continued, read_chats, region_names
from sinkscope.inputs.documents import read_source
from sinkscope.inputs.rules import token_rules
from sinkscope.questions.regions import QUESTION
from sinkscope.questions.regions.measure import MEASUREMENT
from sinkscope.runs.catalogue import table_columns
from sinkscope.tables import summary

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


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
AWKWARD = [
    [("user", "m"), ("assistant", "user"), ("user", "s"), ("assistant", "a")],
    [("system", "start"), ("user", "assistant\nassistant"), ("assistant", "<|im_end|>"), ("user", "  im_start ")],
    [("user", "\U00100000\U001000001\U00100000"), ("assistant", "1"), ("user", "\U00100000")],
]


def told_by(tokenizer: Any, parts: list[tuple[str, str]]) -> tuple[list[int], list[str]]:
    """Token ids and regions of a conversation that is written as these (region, text), "" for no region."""
    whose = [name for name, text in parts for _ in text]
    encoded = tokenizer("".join(text for _, text in parts), add_special_tokens=False, return_offsets_mapping=True)
    regions = []
    for start, stop in encoded["offset_mapping"]:
        words = [name for name in whose[start:stop] if name != "markers"]  # a token may hold characters of both
        regions.append(words[0] if words else "markers")
    return encoded["input_ids"], regions


def regions_of(chat: list[Any], tokenizer: Any, tmp_path: Path) -> tuple[list[int], list[str], list[str]]:
    """Token ids, the region of each, and warnings."""
    corpus = corpus_of(saved(tmp_path, [chat, *CHATS[:2]]), tokenizer, 10_000)
    length = int((corpus.ids[0] >= 0).sum())
    return corpus.ids[0, :length].tolist(), region_names(corpus.regions)[0, :length].tolist(), corpus.warnings


@pytest.mark.parametrize("chat", AWKWARD, ids=["markers", "more markers", "marks"])
@pytest.mark.parametrize("trim", ["", " | trim"])
def test_a_text_that_the_template_s_markers_hold_too(chat: list[Any], trim: str, talker: Any, tmp_path: Path) -> None:
    talker.chat_template = CHATML.replace("m['content']", f"m['content']{trim}")
    parts = []
    for role, text in chat:
        before, after = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
        before, after = ("", "") if trim else (before, after)
        parts += [
            ("markers", f"<|im_start|>{role}\n{before}"),
            (role, text.strip()),
            ("markers", f"{after}<|im_end|>\n"),
        ]
    ids, regions, warnings = regions_of(chat, talker, tmp_path)
    assert (ids, regions) == told_by(talker, parts)
    assert not any("as it stands" in warning for warning in warnings)


THOUGHTS = CHATML.replace(
    "m['content']", "(m['content'].split('</think>')[-1].lstrip() if m['role'] == 'assistant' else m['content'])"
)
LOUD = CHATML.replace("m['content']", "(m['content'] | upper if m['role'] == 'tool' else m['content'])")
MERGED = (
    "{% for m in messages[1:] %}[{{ m['role'] }}]{{ (messages[0]['content'] + '\n\n' if loop.last else '') + "
    "m['content'] }}[end]{% endfor %}"
)
QUIET = "{% for m in messages if m['role'] != 'system' %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
MOVED = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end{{ '!' if m['content'] == 'long' }}]{% endfor %}"
COUNTED = (
    "{{ messages | map(attribute='content') | join | length if messages[0]['content'].startswith('long') }}"
    "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}[end]{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "chat", "parts", "said"),
    [(THOUGHTS, [("user", "hi"), ("assistant", "<think>\nassistant, hi\n</think>\n\nhi"), ("user", "hi")],
      [("markers", "<|im_start|>user\n"), ("user", "hi"), ("markers", "<|im_end|>\n<|im_start|>assistant\n"),
       ("assistant", "hi"), ("markers", "<|im_end|>\n<|im_start|>user\n"), ("user", "hi"),
       ("markers", "<|im_end|>\n")], None),
     (LOUD, [("user", "tool"), ("tool", "Rain."), ("assistant", "tool")],
      [("markers", "<|im_start|>user\n"), ("user", "tool"), ("markers", "<|im_end|>\n<|im_start|>tool\n"),
       ("", "RAIN."), ("markers", "<|im_end|>\n<|im_start|>assistant\n"), ("assistant", "tool"),
       ("markers", "<|im_end|>\n")], r"message 1 \(tool\) as it stands: tokens"),
     (MERGED, [("system", "end"), ("user", "user"), ("assistant", "end"), ("user", "e")],
      [("markers", "[user]"), ("user", "user"), ("markers", "[end][assistant]"), ("assistant", "end"),
       ("markers", "[end][user]"), ("system", "end"), ("markers", "\n\n"), ("user", "e"), ("markers", "[end]")], None),
     (QUIET, [("system", "user"), ("user", "user"), ("assistant", "u")],
      [("markers", "[user]"), ("user", "user"), ("markers", "[end][assistant]"), ("assistant", "u"),
       ("markers", "[end]")], r"message 0 \(system\) as it stands"),
     (COUNTED, [("user", "long" * 9), ("assistant", "long"), ("user", "e")],
      [("", f"41[user]{'long' * 9}[end][assistant]long[end][user]e[end]")],
      r"message 0 \(user\) as it stands"),
     (MOVED, [("user", "long"), ("assistant", "last")],
      [("markers", "[user]"), ("user", "long"), ("", "[end!"), ("markers", "][assistant]"), ("assistant", "last"),
       ("markers", "[end]")], "changes its own markers with the texts")],
    ids=["thoughts left out", "changed", "another order", "left out", "counted", "another marker"],
)  # fmt: skip
def test_a_template_that_changes_what_is_said(
    template: str, chat: list[Any], parts: list[Any], said: str | None, talker: Any, tmp_path: Path
) -> None:
    """What it still says is told, and what nobody can tell is of no region."""
    talker.chat_template = template
    ids, regions, warnings = regions_of(chat, talker, tmp_path)
    assert (ids, regions) == told_by(talker, parts)
    told = [warning for warning in warnings if "the chat template" in warning]
    assert re.search(said, told[0]) if said else not told


def test_a_template_that_says_itself_what_the_model_writes(talker: Any, tmp_path: Path) -> None:
    """It is asked where nothing can be told between marks."""
    talker.chat_template = COUNTED.replace(
        "{{ m['content'] }}",
        "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | upper }}{% endgeneration %}{% else %}"
        "{{ m['content'] }}{% endif %}",
    )
    chat = [("user", "long" * 9), ("assistant", "long")]
    parts = [("", f"40[user]{'long' * 9}[end][assistant]"), ("assistant", "LONG"), ("", "[end]")]
    ids, regions, warnings = regions_of(chat, talker, tmp_path)
    assert (ids, regions) == told_by(talker, parts)
    assert any("message 0 (user) as it stands" in warning for warning in warnings)


def test_tokens_of_nobody_are_in_no_row_of_the_table(talker: Any, tmp_path: Path) -> None:
    talker.chat_template = LOUD
    spec = saved(tmp_path, [[("user", "tool"), ("tool", "Rain."), ("assistant", "tool")], *CHATS])
    run = sinkscope.scan(make_model(), tokenizer=talker, data=spec, batch_size=2, self_check=False)
    corpus = corpus_of(spec, talker)
    regions = run.measured["regions"]
    assert set(regions["region"]) == {"markers", "system", "user", "assistant"}
    counted = regions[(regions["layer"] == 0) & (regions["head"] == 0)]["queries"].sum()
    assert counted == (corpus.regions[:, 1:] >= 0).sum() < (corpus.ids[:, 1:] >= 0).sum()
    assert any("have no region" in warning for warning in run.manifest.warnings)


def test_a_sink_of_nobody_occurs(talker: Any, tmp_path: Path) -> None:
    """It was counted as a sink, and not as an occurrence: its rate was infinite."""
    talker.chat_template = COUNTED
    spec = saved(tmp_path, [[("user", "long tool " * 9), ("assistant", "long")], *CHATS])
    run = sinkscope.scan(make_model(), tokenizer=talker, data=spec, epsilon=0.02, self_check=False)
    assert run.tokens is not None
    unknown = run.tokens["region"] == "unknown"
    assert unknown.any()
    assert not unknown.all()
    assert (run.tokens["sinks"] <= run.tokens["occurrences"]).all()
    assert run.sinks is not None
    assert set(run.sinks["region"]) == set(run.tokens["region"])


def test_a_top_position_is_a_mean_over_the_sequences_that_reach_it(
    chats: str, talker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several datasets too, whose shorter conversations have no such key."""
    (tmp_path / "more").mkdir()
    specs = [chats, saved(tmp_path / "more", [CHATS[0], CHATS[1] * 2])]
    monkeypatch.setattr(summary, "TOP_POSITIONS", 100)
    run = sinkscope.scan(make_model(), tokenizer=talker, data=specs, self_check=False)
    sizes = {data.domain: (corpus_of(data.spec, talker).ids >= 0).sum(0) for data in run.manifest.data}
    places = zip(run.positions["domain"], run.positions["position"], strict=True)
    rows = run.positions.assign(reached=[sizes[domain][place] for domain, place in places])
    rows["sum"] = rows["alpha"] * rows["reached"]
    pooled = rows.groupby("position")[["sum", "reached"]].sum()
    top = run.summary.streams["text"].top_positions
    assert rows.groupby("position")["reached"].nunique().max() > 1
    found = pd.Series({each.position: each.mean_alpha for each in top})
    expected = (pooled["sum"] / pooled["reached"])[found.index]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_the_summary_counts_the_queries_of_all_datasets(chats: str, talker: Any, tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    specs = [chats, saved(tmp_path / "more", [CHATS[0] * 2])]
    both = sinkscope.scan(make_model(), tokenizer=talker, data=specs, self_check=False)
    found = both.summary.streams["text"].measured["regions"]
    table = both.measured["regions"]
    assert table["domain"].nunique() == 2
    for region, rows in table.groupby("region"):
        one = rows[(rows["layer"] == 0) & (rows["head"] == 0)]
        assert found[region]["queries"] == one["queries"].sum()
        weighted = (rows["bos_mass"] * rows["sequences"]).sum() / rows["sequences"].sum()
        assert found[region]["bos_mass"] == pytest.approx(weighted)
    alone = both.summary.domains[both.manifest.data[1].domain].streams["text"].measured["regions"]
    assert alone["system"]["queries"] < found["system"]["queries"]


def steps_of(turns: int, tokenizer: Any, tmp_path: Path) -> int:
    """How many steps of Python's own reading a conversation of so many messages takes in sinkscope."""
    spec = saved(tmp_path, [[(("user", "assistant")[turn % 2], f"s {turn}") for turn in range(turns)]])
    taken = 0

    def counted(frame: Any, event: str, _: Any) -> Any:
        nonlocal taken
        taken += event == "line" and "sinkscope" in frame.f_code.co_filename
        return counted

    before = sys.gettrace()
    sys.settrace(counted)
    try:
        corpus_of(spec, tokenizer, 10**6)
    finally:
        sys.settrace(before)
    return taken


def test_the_time_of_a_conversation_is_that_of_its_length(talker: Any, tmp_path: Path) -> None:
    assert steps_of(400, talker, tmp_path) < 5 * steps_of(100, talker, tmp_path)


@pytest.mark.slow
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


@pytest.mark.slow
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
            out = model(ids, use_cache=True, output_attentions=True, **{CACHE: cache})
            cache, ids = out[CACHE], out.logits[:, -1:].argmax(-1)
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
    assert [*table] == [column.name for column in table_columns(QUESTION.tables[0])]
    by_name = sinkscope.scan(str(tiny_folder), data="prose", device="cpu", **asked)
    by_object = sinkscope.scan(make_model(), tokenizer=talker, data="prose", **asked)
    assert "Special tokens get most attention from" in by_name.summary.streams["text"].measured["regions"]["in_words"]
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
    assert "Mean attention on the first token, by the region of the query" in " ".join(outcome.stdout.split())
    assert "The template's markers get most attention from" in " ".join(outcome.stdout.split())
    run = sinkscope.load_run(outcome.folder)
    assert run.manifest.request.generate == 3
    assert set(run.measured["regions"]["region"]) >= {"markers", "user", "generated"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [([{"messages": [{"role": "wizard", "content": "x"}]}], "message 0 has role 'wizard': give one of"),
     ([{"messages": [{"role": "user", "content": ["x"]}]}], r"message 0 \(user\): its `content` is no text"),
     ([{"messages": [{"role": "user", "content": [{"type": "image"}]}]}], "its `content` is no text"),
     ([{"messages": [{"role": "user", "content": "x"}]}, {"messages": []}], "field 'messages' holds no message"),
     ([{"messages": [{"content": "x"}]}], "message 0 has no role: give one of"),
     ([{"messages": [{"role": "user", "content": " "}]}], "its `content` is empty"),
     ([{"text": "a"}, {"messages": [{"role": "user", "content": "x"}]}], "mixes conversations with texts"),
     ([{"messages": "a"}, {"messages": [{"role": "user", "content": "x"}]}], "mixes conversations with texts")],
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
    with pytest.raises(SinkscopeError, match="holds conversations and the model has no tokenizer"):
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


def test_prompts_and_what_is_written_exceed_the_positions(tmp_path: Path, talker: Any) -> None:
    model, asked = make_model(max_position_embeddings=128), {"generate": 200, "self_check": False}
    said = r"^(\d+) tokens and the 200 of --generate exceed the 128 positions of LlamaForCausalLM: give a smaller"
    with pytest.raises(SinkscopeError, match=said.replace(r"\d+", "16")):
        sinkscope.scan(model, data="prose", tokenizer=talker, seq_len=16, **asked)
    with pytest.raises(SinkscopeError, match=said.replace(r"\d+", "16")):
        sinkscope.dry_run(model, seq_len=16, generate=200)
    with pytest.raises(SinkscopeError, match=said):
        sinkscope.scan(model, data=f"{saved(tmp_path, CHATS)}#messages", tokenizer=talker, **asked)


def test_conversations_need_no_length_for_a_model_of_few_positions(tmp_path: Path, talker: Any) -> None:
    model, spec = make_model(max_position_embeddings=30), saved(tmp_path, CHATS)
    run = sinkscope.scan(model, data=f"{spec}#messages", tokenizer=talker, self_check=False)
    assert run.manifest.data[0].seq_len == 30
    with pytest.raises(SinkscopeError, match="nofield"):
        sinkscope.scan(model, data=f"{spec}#nofield", tokenizer=talker, self_check=False)


def test_a_model_that_writes_nothing(tokenizer: Any) -> None:
    with pytest.raises(SinkscopeError, match="without a next-token head it predicts no text"):
        sinkscope.scan(tiny("bert"), tokenizer=tokenizer, data="prose", generate=3)
    with pytest.raises(SinkscopeError, match=r"--generate continues text"):
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
