"""A keyword of the attention interface that sinkscope does not know, declared from outside the package."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from conftest import Refused, Scan
from models import random_ids, tiny
from packaged import package
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention

import sinkscope
from sinkscope.capture import AttentionCall, Capture, LayerView, attention_keyword, keywords, plan
from sinkscope.capture.keywords import KEYWORDS, unknown_keywords
from sinkscope.checkpoints.forward import Forward
from sinkscope.lookup import Lookup

IDS = random_ids(2, 70)


def multiplied_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, logit_multiplier: Tensor
) -> tuple[Tensor, Tensor]:
    """The model's own attention over whole maps: multiplies the logits of head h by logit_multiplier[h]."""
    key, value = (each.repeat_interleave(module.num_key_value_groups, 1) for each in (key, value))
    maps = (query @ key.mT * scaling * logit_multiplier.view(1, -1, 1, 1) + mask).softmax(-1)
    return (maps @ value).transpose(1, 2), maps


class MultipliedAttention(LlamaAttention):  # type: ignore[misc]
    """Llama's attention without rotary embeddings; passes `logit_multiplier` (H,) to the attention function."""

    def forward(self, hidden_states: Tensor, attention_mask: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (
            project(hidden_states).view(shape).transpose(1, 2) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, multiplied_attention)
        factors = torch.tensor([0.25, 0.5, 2.0, 4.0], dtype=query.dtype)
        output, maps = attend(self, query, key, value, attention_mask, scaling=self.scaling, logit_multiplier=factors)
        return self.o_proj(output.flatten(2)), maps


@pytest.fixture
def model() -> PreTrainedModel:
    llama = tiny("llama", "eager", num_hidden_layers=2).double()
    for layer in llama.layers:
        layer.self_attn.__class__ = MultipliedAttention
    return llama


@pytest.fixture
def declared() -> Iterator[None]:
    """Declares the keyword: it scales the queries, which scales the logits before bias, mask and soft-cap."""

    @attention_keyword("logit_multiplier")
    def multiplied(call: AttentionCall, factors: Tensor) -> AttentionCall:
        return replace(call, query=call.query * factors.view(1, -1, 1, 1))

    yield
    KEYWORDS.remove("logit_multiplier")


@pytest.mark.usefixtures("declared")
def test_the_sums_and_the_output_follow_a_declared_keyword(model: PreTrainedModel) -> None:
    forward, views = Forward(model), []

    def receive(view: LayerView, row: int) -> None:
        views.append(view.attention)

    with torch.no_grad():
        own = forward(IDS, output_attentions=True)
        with Capture(model, plan(model, lambda: forward(IDS[:1, :16])), receive, 0.3).watching():
            watched = forward(IDS)
    torch.testing.assert_close(watched.last_hidden_state, own.last_hidden_state, rtol=1e-12, atol=1e-12)
    assert len(views) == len(own.attentions) == 2
    for sums, maps in zip(views, own.attentions, strict=True):
        assert maps.dtype == torch.float64
        torch.testing.assert_close(sums.first, maps[..., 0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sums.columns, maps.sum(-2), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(sums.entropy, torch.special.entr(maps).sum(-1), rtol=1e-10, atol=1e-12)


@pytest.mark.usefixtures("declared")
def test_a_scan_of_padded_sequences_reads_a_declared_keyword(model: PreTrainedModel) -> None:
    """The self-check compares with the model's own maps; a sequence gives the same alone and in a padded batch."""
    mask = torch.ones_like(IDS)
    mask[1, 50:] = 0
    run = sinkscope.scan(model, data={"input_ids": IDS, "attention_mask": mask}, batch_size=2)
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.self_check.reference == "eager attention maps"
    with torch.no_grad():
        maps = model(IDS[1:, :50], output_attentions=True).attentions
    rows = run.sequences[(run.sequences["sequence"] == 1) & run.sequences["head"].notna()]
    for layer, own in enumerate(maps):
        ours = rows[rows["layer"] == layer].sort_values("head")["bos_mass"].to_numpy()
        np.testing.assert_allclose(ours, own[0, :, 1:, 0].mean(-1).numpy(), rtol=1e-6)


def test_a_keyword_that_nobody_declared_fails_the_self_check(model: PreTrainedModel) -> None:
    with pytest.raises(sinkscope.SinkscopeError, match="self-check failed"):
        sinkscope.scan(model, data=IDS)


UNKNOWN = "which sinkscope does not know and leaves out: "
AGREED = "the self-check agreed with the model's own attention maps without it"
UNCHECKED = "no self-check against the model's own attention maps shows that it changes nothing"


def test_the_manifest_names_a_keyword_that_nobody_declared(model: PreTrainedModel) -> None:
    run = sinkscope.scan(model, data=IDS, self_check=False)
    named = f"the model passes the attention keyword 'logit_multiplier' (in layers.0.self_attn), {UNKNOWN}{UNCHECKED}"
    assert run.manifest.warnings == [named]


@pytest.mark.usefixtures("declared")
def test_a_declared_keyword_and_those_without_effect_are_not_named(model: PreTrainedModel) -> None:
    assert sinkscope.scan(model, data=IDS).manifest.warnings == []
    assert unknown_keywords({"dropout": 0.1, "softcap": 2.0, "of_nobody": None}) == []
    assert unknown_keywords({"of_nobody": 0, "softcap": None}) == ["of_nobody"]


def test_a_keyword_that_the_model_passes_later_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes the keyword for texts of more than 130 tokens only, so neither in the dry run nor in the self-check."""
    llama, own = tiny("llama", num_hidden_layers=2), LlamaAttention.forward

    def forward(self: Any, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return own(self, hidden_states, *args, **kwargs | ({"late": 1} if hidden_states.shape[1] > 130 else {}))

    monkeypatch.setattr(LlamaAttention, "forward", forward)
    run = sinkscope.scan(llama, data=random_ids(2, 140), batch_size=1)
    assert run.manifest.warnings == [
        f"the model passes the attention keyword 'late' (in layers.0.self_attn), {UNKNOWN}{AGREED}"
    ]


@pytest.mark.slow
def test_strict_measures_nothing_where_a_keyword_is_unknown(
    tiny_folder: Path, scan_cli: Scan, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keywords, "WITHOUT_EFFECT", keywords.WITHOUT_EFFECT - {"position_ids"})
    named = f"the model passes the attention keyword 'position_ids' (in layers.0.self_attn), {UNKNOWN}"
    assert refused(tiny_folder, "--strict") == f"--strict: {named}{AGREED}"
    monkeypatch.setattr(keywords, "WITHOUT_EFFECT", keywords.WITHOUT_EFFECT - {"dropout"})
    assert refused(tiny_folder, "--strict", "--no-self-check").endswith(f"{UNCHECKED} (and 1 more)")
    told = scan_cli(tiny_folder)
    assert told.code == 0
    assert f"sinkscope: warning: {named}{AGREED}" in told.stderr.splitlines()


def test_strict_scans_a_model_that_is_read_whole(tiny_folder: Path, scan_cli: Scan) -> None:
    assert scan_cli(tiny_folder, "--strict", "--quiet").code == 0


@pytest.mark.slow
def test_every_keyword_that_transformers_own_attention_is_called_with_is_known() -> None:
    """`indices` (DeepSeek) is None but for a flash package: through `sdpa` and `eager` the mask has it."""
    passed: dict[str, str] = {}
    for path in sorted(Path(transformers.__path__[0], "models").rglob("modeling_*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "attention_interface":
                passed |= {each.arg: path.stem for each in node.keywords if each.arg is not None}
    assert len(passed) > 12
    arguments = {"query", "key", "value", "attention_mask", "is_causal", "indices"}
    assert set(unknown_keywords({name: 1 for name in passed if name not in arguments})) == set()


PACKAGE = """
from dataclasses import replace
def multiplied(call, factors):
    return replace(call, query=call.query * factors.view(1, -1, 1, 1))
"""


def test_a_package_declares_a_keyword(model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = f"outside_{tmp_path.name.replace('-', '_')}"
    entry = {"logit_multiplier": f"{module}:multiplied"}
    package(tmp_path, "outside", "sinkscope.attention_keywords", entry, **{module: PACKAGE})
    monkeypatch.syspath_prepend(tmp_path)
    installed: Lookup[Any] = Lookup(KEYWORDS.what, group=KEYWORDS.group)
    installed.add("scaling", KEYWORDS["scaling"])
    monkeypatch.setattr(keywords, "KEYWORDS", installed)
    run = sinkscope.scan(model, data=IDS)
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.warnings == []
    code = hashlib.sha256(PACKAGE.encode()).hexdigest()
    assert run.manifest.as_dict()["keywords"] == {"logit_multiplier": {"package": "outside", "code_sha256": code}}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda call, value: {}["nokey"], "'nokey' is missing"),
        (lambda call, value: None, "it returned NoneType; an Att"),
    ],
)
def test_a_keyword_of_others_that_fails_is_named(change: Any, told: str, model: PreTrainedModel) -> None:
    """The model was said not to run on its main input alone."""
    attention_keyword("logit_multiplier")(change)
    try:
        with pytest.raises(
            sinkscope.SinkscopeError, match=f"^the attention keyword logit_multiplier: .*test_keywords fails: {told}"
        ):
            sinkscope.scan(model, data=IDS)
    finally:
        KEYWORDS.remove("logit_multiplier")


def test_an_unfinished_scan_is_held_to_the_code_of_a_keyword(
    model: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(stage: str, done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    def code(_: object) -> str:
        return written[-1]

    written = ["first"]
    monkeypatch.setattr("sinkscope.engine.manifest.code_sha256", code)
    attention_keyword("logit_multiplier")(
        lambda call, factors: replace(call, query=call.query * factors.view(1, -1, 1, 1))
    )
    try:
        with pytest.raises(sinkscope.Interrupted):
            sinkscope.scan(model, data=IDS, batch_size=1, shards=tmp_path, progress=stop)
        written.append("second")
        told = r"another keywords\.logit_multiplier\.code_sha256 \(first there, second now\)"
        with pytest.raises(sinkscope.SinkscopeError, match=told):
            sinkscope.scan(model, data=IDS, batch_size=1, shards=tmp_path, resume=True)
    finally:
        KEYWORDS.remove("logit_multiplier")


def test_arms_name_a_keyword_that_nobody_declared(
    tiny_model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keywords, "WITHOUT_EFFECT", keywords.WITHOUT_EFFECT - {"position_ids"})
    found = sinkscope.arms(
        tiny_model, ["kv:4"], data="random", num_sequences=2, seq_len=24, draws=2, tokenizer=tokenizer
    )
    named = f"the model passes the attention keyword 'position_ids' (in layers.0.self_attn), {UNKNOWN}{UNCHECKED}"
    assert named in found.warnings


def test_a_keyword_is_declared_once() -> None:
    with pytest.raises(
        sinkscope.SinkscopeError, match=r"'softcap' is declared already, by sinkscope\.capture\.keywords"
    ):
        attention_keyword("softcap")(lambda call, cap: call)
