"""sinkscope.watch: what it measures is what a scan measures, and the watched model computes as without it."""

from __future__ import annotations

import threading
import warnings
from copy import deepcopy
from io import BytesIO
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import causal
from models import VOCABULARY, tiny
from plain_models import WAYS, Plain, plain, tokens
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from writers import CACHE

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.engine.watching.program import Everywhere
from sinkscope.present.terminal.run import render_run

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")


def state_of(model: nn.Module) -> list[Any]:
    """What a watch changes for its time."""
    hooks = [(len(each._forward_hooks), len(each._forward_pre_hooks)) for each in model.modules()]
    return [hooks, AttentionInterface.get_interface, torch.overrides._get_current_function_mode_stack()]


@pytest.mark.parametrize("way", slow_but(WAYS, "product", "multi_head"))
def test_any_module_is_measured_as_a_scan_measures_it(way: str) -> None:
    model, ids = plain(way), tokens()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    assert_same(seen.run(), sinkscope.scan(model, data=ids))


@pytest.mark.parametrize("family", slow_but(["llama", "gemma2", "gpt2", "gpt_oss", "bert"], "gemma2", "bert"))
def test_transformers_models_are_measured_as_a_scan_measures_them(family: str) -> None:
    model = tiny(family)
    ids = torch.randint(3, VOCABULARY, (2, 70), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, 60:] = 0
    with torch.no_grad():
        before = model(ids, attention_mask=mask).last_hidden_state
        with sinkscope.watch(model) as seen:
            after = model(ids, attention_mask=mask).last_hidden_state
    assert torch.equal(before, after)
    run = seen.run()
    assert_same(run, sinkscope.scan(model, data={"input_ids": ids, "attention_mask": mask}))
    assert run.manifest.data[0].seq_len == 70
    assert run.manifest.self_check.status == "passed"


@pytest.mark.parametrize("way", slow_but(["sdpa", "product", "multi_head"], "product", "multi_head"))
def test_gradients_and_losses_stay_the_same_bit_for_bit(way: str) -> None:
    ids = tokens()

    def trained(watched: bool) -> tuple[Tensor, list[Tensor]]:
        model = Plain(way, dropout=0.2).train()
        torch.manual_seed(3)
        if watched:
            with sinkscope.watch(model) as seen:
                loss = model(ids, ids)
                loss.backward()
            assert len(seen.run().heads) == 8
        else:
            loss = model(ids, ids)
            loss.backward()
        return loss, [each.grad for each in model.parameters() if each.grad is not None]

    (plain_loss, plain_grads), (loss, grads) = trained(False), trained(True)
    assert torch.equal(plain_loss, loss)
    assert all(torch.equal(one, other) for one, other in zip(plain_grads, grads, strict=True))


@pytest.mark.parametrize("way", slow_but(["sdpa", "product", "multi_head"], "product"))
def test_dropout_is_left_out_of_the_numbers(way: str) -> None:
    """In training mode the probabilities are those before dropout; a first layer reads the same x in both modes."""
    model, ids = Plain(way, dropout=0.5), tokens()
    with sinkscope.watch(model.train()) as seen:
        model(ids)
    training = seen.run().heads.query("layer == 0")
    expected = sinkscope.scan(model.eval(), data=ids).heads.query("layer == 0")
    for column in ("bos_mass", "entropy", "self_mass", "value_drain"):
        np.testing.assert_allclose(training[column], expected[column], rtol=1e-5, err_msg=column)


def test_everything_is_gone_after_the_block_and_after_an_error() -> None:
    model = plain("product")
    before = state_of(model)
    seen = sinkscope.watch(model)
    with seen:
        model(tokens())
        assert state_of(model) != before
    assert state_of(model) == before

    failing = model.blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), seen:
        model(tokens())
    failing.remove()
    assert state_of(model) == before
    with seen:
        model(tokens(seed=2))
    assert seen.sequences == 4  # the pass that failed is not counted


def test_a_pass_after_one_that_failed_is_measured() -> None:
    model = plain()
    with sinkscope.watch(model) as seen:
        with pytest.raises(IndexError):
            model(tokens(length=200))  # more than there are places
        model(tokens())
    assert_same(seen.run(), sinkscope.scan(model, data=tokens()))


def test_a_copy_or_a_file_of_the_model_is_not_watched() -> None:
    model, ids = plain(), tokens()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
        copied, file = deepcopy(model), BytesIO()
        torch.save(model, file)
        loaded = torch.load(BytesIO(file.getvalue()), weights_only=False)
        for other in (copied, loaded):
            torch.testing.assert_close(other(tokens(seed=2)), model(tokens(seed=2)))
        quantised = nn.Linear(4, 4)
        for hook in model.blocks[0]._forward_pre_hooks.values():
            quantised.register_forward_pre_hook(hook)
        quantised(torch.zeros(1, 4))
    assert seen.sequences == 6  # the copies' passes are not counted
    assert b"sinkscope" not in file.getvalue().replace(b"tests/", b"")


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning", "ignore:.*jit")
@pytest.mark.parametrize("way", slow_but(["jit", "export", "grads"], "jit"))
def test_a_pass_that_torch_traces_is_the_model_s_alone(way: str) -> None:
    """Its tensors hold no numbers, or those of many passes at once: the trace would hold what we compute."""
    model, ids = plain("product"), tokens()
    weights = dict(model.named_parameters())

    def loss(given: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, given, (row[None],)).sum()

    with sinkscope.watch(model) as seen:
        if way == "jit":
            traced = torch.jit.trace(model, ids, check_trace=False)
            torch.testing.assert_close(traced(ids), model(ids))
        elif way == "export":
            torch.testing.assert_close(torch.export.export(model, (ids,)).module()(ids), model(ids))
        else:
            torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, ids)
            model(ids)
    (told,) = seen.left_out
    assert told == "a pass that torch traced or transformed (torch.jit, torch.export, torch.func) was not read"
    assert_same(seen.run(), sinkscope.scan(model, data=ids))


@pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning", "ignore:.*jit")
def test_a_program_may_trace_a_model_before_it_runs_it() -> None:
    """torch traces it twice and compares: hooks that came in between would make it another model."""
    model, everywhere = plain("product"), Everywhere()
    with everywhere.watching():
        torch.jit.trace(model, tokens())
        model(tokens(seed=2))
    (seen,) = everywhere.measured
    assert seen.model is model


def test_a_program_that_calls_a_model_and_its_base_model_is_read_as_one() -> None:
    """A pipeline may fill a cache by the base model and write by the whole one."""
    model = causal("gemma3")
    ids, everywhere = torch.randint(3, VOCABULARY, (1, 24), generator=torch.Generator().manual_seed(1)), Everywhere()
    with torch.no_grad(), everywhere.watching():
        cache = model.model(ids[:, :20]).past_key_values
        for place in range(20, 24):
            model(ids[:, place : place + 1], **{CACHE: cache})
    (seen,) = everywhere.measured
    assert seen.model is model
    assert seen.left_out == []
    assert_same(seen.run(), sinkscope.scan(model, data=ids))


class Pointed(nn.Linear):
    """A linear layer with a place inside it that people put hooks on, as TransformerLens' have."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width)
        self.point = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.point(x))


def test_hooks_of_others_are_given_what_the_model_computes_and_nothing_else() -> None:
    """Whoever calibrates a quantisation, or keeps activations, must not get the rows that a layer's weight is read
    with."""
    model, given = tiny("llama"), list[tuple[int, ...]]()
    ids = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    for layer in model.layers:
        layer.self_attn.o_proj = Pointed(64).eval()
        for each in layer.self_attn.o_proj.modules():
            each.register_forward_hook(lambda _, args, __: given.append(tuple(args[0].shape)))
            each.register_forward_pre_hook(lambda _, args: given.append(tuple(args[0].shape)))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids)
    run = seen.run()
    assert given == [(2, 20, 64)] * (2 * 2 * len(model.layers))
    assert_same(run, sinkscope.scan(model, data=ids))


class Framed(nn.Module):
    """Runs the layers of a model within that model's own frame, which is no module of it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(each for each in inner.modules() if not any(True for _ in each.children()))
        self.frame = [inner]

    def forward(self, ids: Tensor) -> Tensor:
        return self.frame[0](ids)  # type: ignore[no-any-return]


def test_a_frame_around_the_same_layers_is_no_second_model() -> None:
    model, everywhere = Framed(plain()), Everywhere()
    with torch.no_grad(), everywhere.watching():
        for seed in range(2):
            model(tokens(seed=seed))
    (seen,) = everywhere.watches
    assert seen.model is model


def test_a_model_that_another_one_hides_is_read() -> None:
    inner, everywhere = plain(), Everywhere()
    model = Framed(inner)
    model.layers = nn.ModuleList([nn.Linear(2, 2)])
    with torch.no_grad(), everywhere.watching():
        model(tokens())
    (seen,) = (each for each in everywhere.measured if each.model is inner)
    assert_same(seen.run(), sinkscope.scan(inner, data=tokens()))


def test_two_models_with_one_base_model_are_not_guessed_at() -> None:
    model = causal("gemma3")
    other = deepcopy(model)
    other.model, everywhere = model.model, Everywhere()
    with torch.no_grad(), everywhere.watching():
        model.model(tokens() % VOCABULARY)
    assert [seen.model for seen in everywhere.measured] == [model.model]


def test_an_interruption_inside_a_pass_leaves_nothing_behind() -> None:
    model = plain()
    before = state_of(model)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with sinkscope.watch(model) as seen:
        stop = model.blocks[1].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(tokens())
        stop.remove()
        model(tokens())
    assert state_of(model) == before
    assert_same(seen.run(), sinkscope.scan(model, data=tokens()))


def test_labels_are_domains_and_reset_forgets() -> None:
    model = plain()
    with sinkscope.watch(model) as seen:
        model(tokens(seed=9))
        seen.reset()
        seen.label("one")
        model(tokens(seed=1))
        seen.label("two")
        model(tokens(3, 30, seed=2))
    run = seen.run()
    assert run.heads["domain"].unique().tolist() == ["one", "two"]
    assert [each.sequences for each in run.manifest.data] == [2, 3]
    of_two = run.heads[run.heads["domain"] == "two"]["bos_mass"]
    np.testing.assert_allclose(of_two, sinkscope.scan(model, data=tokens(3, 30, seed=2)).heads["bos_mass"], rtol=1e-5)


def test_sequences_of_several_lengths_give_the_tables_of_one_scan() -> None:
    model, long, short = plain(), tokens(1, 100), tokens(1, 80, seed=5)
    with sinkscope.watch(model) as seen:
        model(short)
        model(long)
    run = seen.run()
    assert run.length_curve["length"].unique().tolist() == [64, 100]
    whole = run.length_curve.query("length == 100")
    np.testing.assert_allclose(
        whole["sink_score"],
        sinkscope.scan(model, data=long).length_curve.query("length == 100")["sink_score"],
        rtol=1e-5,
    )
    assert run.manifest.data[0].shortest == 80
    assert "2 x 80 to 100 of watched" in repr(run)
    screen = render_run(run)
    assert "watched: 2 sequences of 80 to 100 tokens\n" in screen
    assert "\nT = 80 to 100 " in screen


@pytest.mark.slow
def test_a_run_of_a_watch_is_saved_compared_and_checked(tmp_path: Any) -> None:
    model = plain()
    with sinkscope.watch(model) as seen:
        model(tokens())
    run = seen.run()
    run.save(tmp_path / "run")
    loaded = sinkscope.load_run(tmp_path / "run")
    assert loaded.manifest.request.given == "watched passes"
    assert sinkscope.check(loaded, sinkscope.baseline_of(run)).passed
    assert sinkscope.compare(run, sinkscope.scan(model, data=tokens())) is not None


def test_tokens_are_named_where_ids_pass_by_and_positions_elsewhere() -> None:
    model = plain()
    with torch.no_grad():
        model.blocks[0].attn.c_attn.weight[:64] *= 6  # sharp attention: some key is a sink
    with sinkscope.watch(model) as seen:
        model(tokens(4, 40))
    run = seen.run()
    assert run.sinks is not None
    assert len(run.sinks) > 0
    assert set(run.sinks["token"].astype(str)) <= {str(number) for number in range(61)}
    with sinkscope.watch(model.blocks[0]) as seen:
        model.blocks[0](torch.randn(2, 20, 32))
    assert seen.run().manifest.first_token.text == "first position"


def test_every_and_limit_bound_what_is_measured() -> None:
    model = plain()
    with sinkscope.watch(model, every=3) as seen:
        for number in range(7):
            model(tokens(1, 20, seed=number))
    assert seen.sequences == 3
    with sinkscope.watch(model, limit=4) as seen:
        for number in range(7):
            model(tokens(2, 20, seed=number))
    assert seen.sequences == 4
    with pytest.raises(SinkscopeError, match="every=0"):
        sinkscope.watch(model, every=0)


def test_a_scan_inside_a_watch_is_not_watched() -> None:
    model = tiny("llama")
    ids = torch.randint(3, VOCABULARY, (2, 20), generator=torch.Generator().manual_seed(1))
    with sinkscope.watch(model) as seen:
        model(ids)
        inner = sinkscope.scan(model, data=ids)
    assert seen.sequences == 2
    assert_same(seen.run(), inner)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("family", ["", "llama"])
def test_passes_in_inference_mode_and_others_are_measured_together(first: bool, family: str) -> None:
    """As where a program trains and evaluates in turn."""
    model: Any = tiny(family) if family else plain()
    texts = [tokens(seed=seed) for seed in (1, 2)]
    with sinkscope.watch(model) as seen:
        for number, ids in enumerate(texts):
            with torch.inference_mode(first == (number == 0)):
                model(ids)
    assert seen.left_out == []
    assert_same(seen.run(), sinkscope.scan(model, data=torch.cat(texts)))


def test_other_threads_are_not_watched() -> None:
    model = plain()
    with sinkscope.watch(model) as seen:
        thread = threading.Thread(target=lambda: model(tokens()))
        thread.start()
        thread.join()
    with pytest.raises(SinkscopeError, match="threads=True watches all threads"):
        seen.run()


def test_autocast_does_not_touch_the_sums() -> None:
    model = plain()
    with torch.no_grad(), sinkscope.watch(model) as seen, torch.autocast("cpu", dtype=torch.bfloat16):
        model(tokens())
    expected = sinkscope.scan(model, data=tokens()).heads
    np.testing.assert_allclose(seen.run().heads["bos_mass"], expected["bos_mass"], atol=0.02)


def test_attention_whose_tensors_are_written_into_is_left_out_and_named() -> None:
    model = plain()
    model.blocks[1].attn.forward = _written_into(model.blocks[1].attn)  # type: ignore[method-assign]
    with warnings.catch_warnings(), sinkscope.watch(model) as seen, torch.no_grad():
        warnings.simplefilter("ignore")
        model(tokens())
    with pytest.raises(SinkscopeError, match="writes into the tensors"):
        seen.run()


def _written_into(module: nn.Module) -> Any:
    def forward(x: Tensor) -> Tensor:
        query, key, value = (each.view(*x.shape[:2], 4, -1).transpose(1, 2) for each in module.c_attn(x).split(32, 2))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        key.zero_()
        return module.c_proj(mixed.transpose(1, 2).reshape(x.shape))

    return forward


def test_what_fails_in_measuring_is_no_error_of_the_model() -> None:
    def broken(*_: Any) -> Any:
        raise IndexError("a fault of ours")

    model = plain()
    with torch.no_grad(), warnings.catch_warnings(), sinkscope.watch(model) as seen:
        warnings.simplefilter("error")
        seen._measurer.measure = broken  # type: ignore[method-assign]
        assert model(tokens()).shape == (2, 20, 61)
    with pytest.raises(SinkscopeError, match="a fault of ours"):
        seen.run()


def test_a_name_and_a_number_are_refused_in_one_line() -> None:
    with pytest.raises(SinkscopeError, match=r"a model \(torch.nn.Module\) is needed, not str"):
        sinkscope.watch("llama")


def test_what_is_derived_from_weights_is_kept_until_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they change behind torch's back: writing through `.data` does not count as a write."""
    model, ids = tiny("llama"), torch.randint(3, VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(0))
    projections = [layer.self_attn.o_proj.weight for layer in model.layers]
    own, factorised = torch.linalg.qr, list[Tensor]()
    monkeypatch.setattr(torch.linalg, "qr", lambda each, **given: factorised.append(each) or own(each, **given))
    with torch.no_grad(), sinkscope.watch(model) as seen:
        model(ids, use_cache=False)
        model(ids, use_cache=False)
        assert len(factorised) == len(projections)
        seen.label("changed")
        projections[0].data[:, 0] *= 3
        model(ids, use_cache=False)
    assert len(factorised) == len(projections) + 1
    run = seen.run()
    changed = run.heads[run.heads["domain"] == "changed"]
    expected = sinkscope.scan(model, data=ids, self_check=False).heads
    np.testing.assert_allclose(changed["ftvvn"], expected["ftvvn"], rtol=1e-5)
    assert not np.allclose(changed["ftvvn"], run.heads[run.heads["domain"] != "changed"]["ftvvn"])


def test_no_part_of_a_model_that_is_refused_is_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model inside PEFT's prompts was, over a text that begins with tokens of theirs."""
    model, other, everywhere = nn.Sequential(plain()), plain("product"), Everywhere()

    def refusing(module: nn.Module, **settings: Any) -> Any:
        if module is model:
            raise sinkscope.SinkscopeError("it puts tokens of its own before the text")
        return sinkscope.watch(module, **settings)

    monkeypatch.setattr("sinkscope.engine.watching.program.Watch", refusing)
    with torch.no_grad(), everywhere.watching():
        model(tokens())
        other(tokens())
    assert everywhere.refused == {"Sequential": "it puts tokens of its own before the text"}
    assert [watch.model for watch in everywhere.measured] == [other]
