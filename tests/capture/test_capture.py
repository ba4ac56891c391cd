"""A watched model: its output, its hooks, the attention registry, padding, and which models are refused."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from models import EAGER_ONLY, FAMILIES, random_ids, tiny
from tiers import slow_but
from transformers import AttentionInterface
from watched import find, hooks

import sinkscope
from sinkscope.capture import Capture, plan
from sinkscope.capture.calls import AttentionCall, Narrowing
from sinkscope.capture.interface import shadowed
from sinkscope.capture.kernels.attend import read
from sinkscope.capture.masks.lazy import made_in_strips
from sinkscope.capture.output_projection import _by_cholesky, output_projection
from sinkscope.checkpoints import wrap_model
from sinkscope.checkpoints.forward import Forward


@pytest.mark.parametrize("family", slow_but(FAMILIES, "llama", "gpt2", "gemma2", "gpt_oss", "bert"))
def test_output_is_the_model_s_own_and_nothing_stays(family: str) -> None:
    model, ids = tiny(family), random_ids(2, 90)
    registry, state = dict(AttentionInterface._global_mapping), hooks(model)
    implementation = model.config._attn_implementation
    forward, found = find(model)
    with torch.no_grad():
        plain = forward(ids).last_hidden_state
        with Capture(model, found, lambda view, row: None, 0.3).watching():
            watched = forward(ids).last_hidden_state
        after = forward(ids).last_hidden_state
    assert float((watched - plain).norm() / plain.norm()) < 3e-6
    assert torch.equal(after, plain)
    assert dict(AttentionInterface._global_mapping) == registry
    assert hooks(model) == state
    assert model.config._attn_implementation == implementation


def test_everything_is_put_back_after_an_exception() -> None:
    model = tiny("llama")
    registry, state = dict(AttentionInterface._global_mapping), hooks(model)
    forward, found = find(model)

    def fail(view: Any, row: int) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"), Capture(model, found, fail, 0.3).watching():
        forward(random_ids(1, 20))
    assert dict(AttentionInterface._global_mapping) == registry
    assert hooks(model) == state


def test_self_check_leaves_the_model_as_it_was() -> None:
    model = tiny("gemma3")
    before, state = model.config._attn_implementation, hooks(model)
    with torch.no_grad():
        plain = model(random_ids(1, 40)).last_hidden_state
        run = sinkscope.scan(model, data=random_ids(2, 40))
        assert hooks(model) == state
        assert torch.equal(model(random_ids(1, 40)).last_hidden_state, plain)
        # transformers puts its own hooks in again, once, when it is asked for what they collect
        for _ in range(2):
            assert len(model(random_ids(1, 40), output_hidden_states=True).hidden_states) == 4
            assert len(sinkscope.scan(model, data=random_ids(2, 40)).heads) == 12
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.self_check.layers == 3
    assert model.config._attn_implementation == before


def test_self_check_stops_a_scan_whose_sums_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check fails where the capture uses a wrong scaling."""
    import sinkscope.capture.views as watch

    right = watch.read

    def wrong(call: AttentionCall, failures: list[str]) -> Any:
        return right(replace(call, scaling=call.scaling * 1.3), failures)

    monkeypatch.setattr(watch, "read", wrong)
    with pytest.raises(sinkscope.SinkscopeError, match="self-check failed"):
        sinkscope.scan(tiny("llama"), data=random_ids(2, 40))


def test_sites_are_named_by_module_and_block() -> None:
    _, found = find(tiny("bert"))
    first = found.sites[0]
    assert first.module == "encoder.layer.0.attention.self"
    assert first.block == "encoder.layer.0"
    assert first.projection == "encoder.layer.0.attention.output.dense"
    assert [site.layer for site in found.sites] == list(range(len(found.sites)))
    _, found = find(tiny("gemma3"))
    assert {str(site.kind) for site in found.sites} == {"sliding:16", "full"}


@pytest.mark.parametrize("window", [6, 30, 4096, None])
def test_a_window_that_stands_in_the_mask_alone_is_named(window: int | None) -> None:
    """Also one that is longer than the dry run, in which it hides no key."""
    from transformers import PhimoeConfig, PhimoeModel

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = PhimoeConfig(
        vocab_size=97, num_key_value_heads=2, num_local_experts=2, sliding_window=window, pad_token_id=None, **sizes
    )
    run = sinkscope.scan(PhimoeModel(config).eval(), data=random_ids(1, 40))
    assert set(run.heads["kind"]) == {"full" if window is None else f"sliding:{window}"}
    out_of_reach = run.summary.streams["text"].windows.layers_out_of_reach
    assert out_of_reach == ([0, 1] if window in (6, 30) else [])


def test_each_part_s_window_is_its_mask_s() -> None:
    from families import tiny_model
    from transformers import AutoModelForCausalLM

    pytest.importorskip("transformers", minversion="5.24", reason="before, this model hid no keys by windows")
    run = sinkscope.scan(tiny_model(AutoModelForCausalLM, "blt"), data=random_ids(1, 40))
    sizes = {site.module.split(".")[0]: site.kind.size for site in run.manifest.attention if "self_attn" in site.module}
    assert sizes == {"patcher": 8, "local_encoder": 512, "global_transformer": None, "local_decoder": 512}


def test_a_model_in_training_mode_is_refused() -> None:
    with pytest.raises(sinkscope.SinkscopeError, match=r"model\.eval"):
        sinkscope.scan(tiny("llama").train(), data=random_ids(1, 20))


def test_a_model_with_a_head_is_measured_without_it() -> None:
    from transformers import LlamaForCausalLM

    base = tiny("llama")
    full = LlamaForCausalLM(base.config).eval()
    full.model = base
    ids = random_ids(2, 30)
    assert sinkscope.scan(full, data=ids).heads.equals(sinkscope.scan(base, data=ids).heads)


def test_a_model_without_softmax_attention_is_refused() -> None:
    from transformers import MambaConfig, MambaModel

    config = MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, state_size=4)
    with pytest.raises(sinkscope.SinkscopeError, match="MambaModel"):
        sinkscope.scan(MambaModel(config).eval(), data=torch.randint(0, 50, (1, 20)))


def test_learned_sinks_and_eager_only_families_are_read() -> None:
    assert "gpt_oss" in EAGER_ONLY
    run = sinkscope.scan(tiny("gpt_oss"), data=random_ids(2, 40))
    assert (run.heads["learned_sink_mass"] > 0).all()
    plain = sinkscope.scan(tiny("llama"), data=random_ids(2, 40))
    assert (plain.heads["learned_sink_mass"] == 0).all()


def test_projection_factors_keep_norms() -> None:
    from sinkscope.capture.output_projection import head_factors

    linear = torch.nn.Linear(12, 20)
    factors = head_factors(linear, heads=3, head_dim=4)
    x = torch.randn(5, 3, 4)
    weight = linear.weight.detach().unflatten(1, (3, 4))
    expected = torch.einsum("ohd,bhd->bho", weight, x).norm(dim=-1)
    np.testing.assert_allclose(torch.einsum("hrd,bhd->bhr", factors, x).norm(dim=-1), expected, rtol=1e-5)


@pytest.mark.parametrize("rank", [8, 5])
def test_projection_factors_of_an_accelerator_are_as_accurate(rank: int) -> None:
    """Along the directions that W_O all but loses too, and where a head's slice lacks full rank."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.linalg.qr(torch.randn(3, *shape, generator=generator)).Q for shape in ((60, 8), (8, 8)))
    sizes = 10.0 ** -torch.arange(8)
    sizes[rank:] = 0.0
    slices = (left * sizes) @ right.mT
    vectors = right.double()
    expected = (slices.double() @ vectors).norm(dim=1)
    for factors in (_by_cholesky(slices), torch.linalg.qr(slices, mode="r").R):
        assert factors.dtype == torch.float32
        ours = (factors.double() @ vectors).norm(dim=1)
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=3e-7)


def test_projection_weight_that_cannot_be_read_is_asked_for() -> None:
    from sinkscope.capture.output_projection import head_factors

    class Packed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.packed = torch.nn.Parameter(torch.randn(12, 20))
            self.bias = torch.nn.Parameter(torch.randn(20))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.packed + self.bias

    packed = Packed()
    plain = torch.nn.Linear(12, 20)
    plain.weight.data = packed.packed.data.T.clone()
    ours, expected = (head_factors(module, 3, 4) for module in (packed, plain))
    np.testing.assert_allclose(ours.mT @ ours, expected.mT @ expected, rtol=1e-4, atol=1e-4)


def test_a_weight_with_its_scale_beside_it_is_asked_for() -> None:
    """An 8-bit weight has a scale that only the layer knows, so the matrix is found by applying the layer."""
    from sinkscope.capture.output_projection import projection_weight

    class Scaled(torch.nn.Linear):
        def forward(self, read: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(read, self.weight.to(read.dtype) * 0.25)

    layer = Scaled(12, 5, bias=False)
    weight = layer.weight.detach().to(torch.float8_e4m3fn)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    torch.testing.assert_close(projection_weight(layer, 12), weight.float() * 0.25)


def test_a_layer_s_tensors_go_with_its_block() -> None:
    """A layer's tensors are released before the next layer is read, so memory does not grow with the layers."""
    model, ids = tiny("llama"), random_ids(2, 40)
    forward, found = find(model)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def receive(view: Any, row: int) -> None:
        alive.append(sum(one() is not None for one in kept))
        kept.extend(weakref.ref(tensor) for tensor in (view.raw_query, view.output, view.attention_input))

    with Capture(model, found, receive, 0.3).watching():
        forward(ids)
    assert len(alive) > 1
    assert max(alive) == 0


def test_an_attention_module_that_the_model_does_not_hold_is_refused() -> None:
    model = tiny("llama", num_hidden_layers=1)
    layer = model.layers[0]
    attention = layer.self_attn
    del layer.self_attn
    layer.__dict__["self_attn"] = attention  # as a list or a function would hide it
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        sinkscope.scan(model, data=random_ids(1, 20))
    assert str(refused.value) == "an attention module outside the model was called: LlamaAttention"


@pytest.mark.parametrize(
    ("times", "said"),
    [(0, "attention module 'layers.1.self_attn' was called in the dry run, but not on this input"),
     (2, "attention module 'layers.1.self_attn' was called more often than in the dry run")],
)  # fmt: skip
def test_calls_that_depend_on_the_input_are_refused(times: int, said: str) -> None:
    model = tiny("llama", num_hidden_layers=2)
    layer, plain = model.layers[1], model.layers[1].forward

    def forward(hidden: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        for _ in range(times if hidden.shape[1] > 30 else 1):
            hidden = plain(hidden, **kwargs)
        return hidden

    layer.forward = forward
    with pytest.raises(sinkscope.SinkscopeError) as refused:
        sinkscope.scan(model, data=random_ids(1, 40), self_check=False)
    assert str(refused.value).startswith(said)


def test_fewer_queries_than_keys_without_a_mask_are_aligned_as_in_torch() -> None:
    """Query 0 sees key 0 alone, and the last keys are seen by none."""
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    model = tiny("llama", num_hidden_layers=1)
    seen: list[AttentionCall] = []

    def handler(module: torch.nn.Module, call: AttentionCall) -> torch.Tensor:
        seen.append(call)
        return read(call, [])[0]

    with shadowed(model, handler):
        ours, _ = AttentionInterface()["sdpa"](model.layers[0].self_attn, query, key, value, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(ours, expected.transpose(1, 2))
    assert seen[0].key.shape[2] == 5


@pytest.mark.parametrize("rows", [1, 12])
def test_keys_are_hidden_beside_what_a_float_mask_adds(rows: int) -> None:
    """Masks of one row for all queries, plain and lazy, against whole maps in float64."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 12, 8, dtype=torch.float64) for _ in range(3))
    bias = torch.randn(2, 1, rows, 12, dtype=torch.float64)
    lazy = made_in_strips(lambda start, stop, low, high: bias[:, :, start:stop, low:high], 2, rows, 12)
    hidden = torch.arange(12) == 3
    logits = (query @ key.mT * 0.5 + bias).masked_fill(hidden & (torch.arange(12)[:, None] > 3), -torch.inf)
    expected = (logits.softmax(-1) @ value).transpose(1, 2)
    for mask in (bias, lazy):
        call = AttentionCall(query, key, value, mask, scaling=0.5)
        narrow = Narrowing(lambda queries, keys: (~hidden[keys] | (keys >= queries))[None, None])
        torch.testing.assert_close(read(narrow(call), [])[0], expected)


@pytest.mark.parametrize(
    ("family", "auto", "expected", "direct"),
    slow_but(
        [
            ("moshi", "CausalLM", "self_attn.o_proj.linear", True),
            ("inkling2_text", "CausalLM", "self_attn.o_proj.linear", False),
            ("neomme", "MaskedLM", "self_attn.output_projection.o_proj", False),
            ("cpmant", "CausalLM", "self_att.self_attention.attention_out", True),
            ("funnel", "MaskedLM", "attention.post_proj", True),
            ("bigbird_pegasus", "Seq2SeqLM", "self_attn.output", True),
        ],
        ("neomme", "MaskedLM", "self_attn.output_projection.o_proj", False),
        ("cpmant", "CausalLM", "self_att.self_attention.attention_out", True),
    ),
)
def test_the_layer_that_reads_the_heads_is_found_inside_others(
    family: str, auto: str, expected: str, direct: bool
) -> None:
    """A layer within the module that projects, with a gate before it or without, or under a name of its own. It reads
    the heads side by side, in their order."""
    import transformers
    from families import tiny_model

    if family not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    model = wrap_model(tiny_model(getattr(transformers, f"AutoModelFor{auto}"), family)).model
    forward = Forward(model)
    ids = random_ids(1, 20)
    found = plan(model, lambda: forward(ids))
    site = found.sites[0]
    assert site.projection is not None
    assert site.projection.endswith(expected)
    seen: list[tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]] = []
    read_by: list[torch.Tensor] = []
    hook = model.get_submodule(site.projection).register_forward_pre_hook(lambda _, args: read_by.append(args[0]))

    def keep(view: Any, row: int) -> None:
        if view.site is site:
            seen.append((view.output, view.raw_projected, view.factors))

    with torch.no_grad(), Capture(model, found, keep, 0.3).watching():
        forward(ids)
    hook.remove()
    ((output, projected, factors),) = seen
    assert projected is not None
    assert factors.shape[0] == site.heads
    torch.testing.assert_close(projected.flatten(2).reshape(read_by[0].shape), read_by[0])
    assert torch.allclose(output.flatten(), projected.flatten(), atol=1e-5) == direct


def test_a_layer_that_changes_what_its_own_layer_returns_is_no_projection() -> None:
    class Clipped(torch.nn.Module):
        def __init__(self, wide: bool) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)
            if not wide:
                self.register_buffer("most", torch.ones(()))

    owner = torch.nn.Module()
    owner.o_proj = Clipped(True)
    assert output_projection(owner, "", 8) == "o_proj.linear"
    owner.o_proj = Clipped(False)
    assert output_projection(owner, "", 8) is None


def test_a_run_says_where_no_projection_was_found() -> None:
    from families import tiny_model
    from transformers import AutoModelForCausalLM

    run = sinkscope.scan(tiny_model(AutoModelForCausalLM, "xlnet"), data=random_ids(1, 20), self_check=False)
    assert run.heads["honor"].isna().all()
    assert run.manifest.warnings == [
        "no linear layer that reads the heads of 2 attention calls side by side was found (the first is "
        "layer.0.rel_attn): columns that need W_O are empty there"
    ]


@pytest.mark.parametrize(
    ("family", "settings", "named"),
    [
        ("mistral", {}, 8),
        ("modernbert", {"local_attention": 16}, 9),
        ("ultrabert", {}, 9),
        ("neomme", {}, 9),
        ("embedding_gemma2_text", {}, 9),
        ("openai_privacy_filter", {}, 9),
        ("t5gemma", {}, 9),
        ("t5gemma2", {}, 4),
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 14}, 8),
        ("gemma4_text", {"use_bidirectional_attention": "all", "sliding_window": 14}, 9),
    ],
)
def test_the_size_of_a_window_is_the_number_of_keys_up_to_the_query(
    family: str, settings: dict[str, Any], named: int
) -> None:
    """However the model counts it: the mask tells, on a text longer than the window."""
    from families import tiny_config
    from transformers import CONFIG_MAPPING, AutoModel

    if family not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {family}")
    config = tiny_config(family)
    if settings:
        config = type(config)(**{**config.to_diff_dict(), **settings})
    model = wrap_model(AutoModel.from_config(config).eval()).model
    forward = Forward(model)
    found = plan(model, lambda: forward(random_ids(1, 16)))
    named_by_module = {site.module: site.kind.size for site in found.sites if site.kind.name == "sliding"}
    names = {module: name for name, module in model.named_modules()}
    seen = {}

    def keep(module: torch.nn.Module, call: AttentionCall) -> torch.Tensor:
        queries = call.query.shape[2]
        seen[names[module]] = queries - int(call.visible.reach[0][-1])
        return read(call, [])[0]

    with torch.no_grad(), shadowed(model, keep):
        forward(random_ids(1, 40))
    assert {name: seen[name] for name in named_by_module} == named_by_module
    assert named in named_by_module.values()


def test_the_memory_of_a_single_sequence_is_told_whatever_its_step() -> None:
    """Of one sequence, torch's reshape and transpose give the first axis another step for the same numbers."""
    from sinkscope.capture.view import _same_memory

    heads = torch.arange(24.0).view(1, 3, 2, 4)
    assert _same_memory(heads, heads.as_strided(heads.shape, (8, 8, 4, 1)))
    assert not _same_memory(heads, heads.clone())
    assert not _same_memory(heads, heads.as_strided(heads.shape, (24, 4, 12, 1)))
