"""Threads: one measurement at a time, and other threads' forward passes neither fail nor are measured."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from models import random_ids, tiny
from pandas.testing import assert_frame_equal
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface
from watched import find, hooks

import sinkscope
from sinkscope.capture import Capture
from sinkscope.capture.alone import alone
from sinkscope.capture.hooks import hooked
from sinkscope.capture.interface import shadowed
from sinkscope.capture.listeners import overheard
from sinkscope.capture.masks.lazy import lazy_masks
from sinkscope.capture.private_doors import interface_lookup
from sinkscope.capture.registries import layered
from sinkscope.wiring.parts import find_parts

PATIENCE = 60.0


def elsewhere(work: Callable[[], Any]) -> Any:
    """What `work` returns in another thread; this one waits for it."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result(PATIENCE)


def output(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        hidden: Tensor = model(ids).last_hidden_state
    return hidden


def registries() -> tuple[object, object, dict[str, Any], dict[str, Any]]:
    attention, masks = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    return attention, masks, dict(attention), dict(masks)


def never(module: nn.Module, call: Any) -> Tensor:
    raise AssertionError("a pass of another thread was measured")


def test_a_scan_in_a_second_thread_is_refused_and_the_first_one_ends_as_if_alone() -> None:
    ids, model, other = random_ids(2, 30), tiny("llama"), tiny("gpt2")
    before, began, may_end = registries(), Event(), Event()

    def wait(stage: str, done: int, total: int) -> None:
        if stage == "scanning" and done == 1:
            began.set()
            assert may_end.wait(PATIENCE)

    with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        first = pool.submit(sinkscope.scan, model, data=ids, batch_size=1, progress=wait)
        assert began.wait(PATIENCE)
        with pytest.raises(sinkscope.SinkscopeError) as refused:
            sinkscope.scan(other, data=ids)
        may_end.set()
        run = first.result(PATIENCE)
    assert str(refused.value) == (
        "a scan of GPT2Model cannot start: a scan of LlamaModel runs in this process, in the thread 'first_0', and one "
        "model is measured at a time; wait until it has ended, or use another process"
    )
    assert registries() == before
    assert run.heads.equals(sinkscope.scan(model, data=ids, batch_size=1).heads)
    assert sinkscope.scan(other, data=ids).heads["bos_mass"].notna().all()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_all_that_is_measured_does_not_feel_passes_of_another_thread(family: str, tmp_path: Path) -> None:
    """The other thread uses the same model in a loop, over texts of other lengths, while `--measure all` runs."""
    model, ids, ended = tiny(family, num_hidden_layers=2), random_ids(4, 70), Event()
    texts = [random_ids(2, length, seed=length) for length in (9, 70, 33)]
    alone_there = [output(model, text) for text in texts]

    def scanned(name: str) -> dict[str, bytes]:
        sinkscope.scan(model, data=ids, batch_size=1, measure="all", self_check=False).save(tmp_path / name)
        kept = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        return {name: content for name, content in kept.items() if name != "manifest.json"}

    def used() -> int:
        passes = 0
        while not ended.is_set():
            for text, wanted in zip(texts, alone_there, strict=True):
                torch.testing.assert_close(output(model, text), wanted)
            passes += len(texts)
        return passes

    quiet = scanned("quiet")
    with ThreadPoolExecutor(1) as pool:
        loop = pool.submit(used)
        try:
            disturbed = scanned("disturbed")
        finally:
            ended.set()
        assert loop.result(PATIENCE) > 10
    assert {"switch.csv", "modules.csv", "spikes.csv", "smoothing.csv", "alignment.parquet"} <= quiet.keys()
    assert [name for name in quiet if disturbed[name] != quiet[name]] == []
    assert hooks(model) == 0


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("same", [True, False], ids=["the same model", "another model"])
def test_a_forward_pass_of_another_thread_is_not_measured(same: bool, implementation: str) -> None:
    ids, longer = random_ids(2, 30), random_ids(3, 40)
    model = tiny("llama", implementation)
    plain = model if same else tiny("mistral", implementation)
    expected, alone_run = output(plain, longer), sinkscope.scan(model, data=ids, self_check=False)
    forward, found = find(model)
    views: list[Any] = []
    inner: list[Tensor] = []

    def see(view: Any, row: int) -> None:
        views.append(view.attention.first.clone())
        if not inner:  # in the middle of our own pass
            inner.append(elsewhere(lambda: output(plain, longer)))

    with Capture(model, found, see, epsilon=0.3).watching():
        assert torch.equal(elsewhere(lambda: output(plain, longer)), expected)
        forward(ids)
    assert torch.equal(inner[0], expected)
    assert [view.shape for view in views] == 3 * [(2, 4, 30)]
    again = sinkscope.scan(model, data=ids, self_check=False)
    assert again.heads.equals(alone_run.heads)


def test_hooks_observe_the_thread_that_put_them_there_and_are_all_taken_off() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    model = nn.Sequential(*layers)
    seen: list[tuple[str, int]] = []

    def before(module: nn.Module, args: Any) -> None:
        seen.append(("before", layers.index(module)))  # type: ignore[arg-type]

    def first(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        seen.append(("first", layers.index(module)))  # type: ignore[arg-type]
        return (torch.zeros_like(args[0]),), kwargs

    def after(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        seen.append(("after", layers.index(module)))  # type: ignore[arg-type]

    def run() -> Tensor:
        found: Tensor = model(torch.ones(1, 2))
        return found

    own, state = run(), hooks(model)
    with pytest.raises(RuntimeError, match="stop"), hooked(layers, before):
        with hooked(iter(layers), first, after, with_kwargs=True, first=True):
            assert torch.equal(elsewhere(run), own)
            assert seen == []
            assert not torch.equal(run(), own)
        assert seen == [(name, layer) for layer in (0, 1) for name in ("first", "before", "after")]
        raise RuntimeError("stop")
    assert hooks(model) == state
    assert torch.equal(run(), own)


def test_the_parts_of_a_block_are_not_those_of_another_thread_s_pass() -> None:
    model, ids = tiny("llama"), random_ids(2, 12)
    _, found = find(model)
    assert len(find_parts(model, found, lambda: output(model, ids))) == 3
    assert find_parts(model, found, lambda: elsewhere(lambda: output(model, ids))) == {}


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["modules", "spikes"])
def test_a_measurement_s_hooks_do_not_feel_another_thread_s_pass(measure: str) -> None:
    """The other thread runs the same model when our own pass has ended its last block."""
    model, ids = tiny("llama"), random_ids(2, 30)
    with torch.no_grad():
        model.layers[1].mlp.down_proj.weight[7, 13] = 3e4  # a massive activation, without which there are no spikes
    alone_run = sinkscope.scan(model, data=ids, self_check=False, measure=measure)
    assert len(alone_run.measured[measure])

    def interrupt(module: nn.Module, args: Any, result: Any) -> None:
        elsewhere(lambda: output(model, ids.flip(-1)))

    with hooked(model.layers[-1], post=interrupt):
        run = sinkscope.scan(model, data=ids, self_check=False, measure=measure)
    assert_frame_equal(run.measured[measure], alone_run.measured[measure])


def test_only_one_file_puts_hooks_on_modules() -> None:
    """So that no hook forgets the guard against other threads."""
    root = Path(sinkscope.__path__[0])
    texts = {path.relative_to(root).as_posix(): path.read_text("utf-8") for path in root.rglob("*.py")}
    assert [name for name, text in texts.items() if "register_forward" in text] == ["capture/hooks.py"]


def test_inline_attention_of_another_thread_is_not_measured() -> None:
    from families import tiny_model
    from transformers import AutoModelForCausalLM

    model = tiny_model(AutoModelForCausalLM, "bloom").base_model
    ids, longer = random_ids(2, 20), random_ids(3, 25)
    expected = output(model, longer)
    forward, found = find(model)
    shapes: list[Any] = []

    def see(view: Any, row: int) -> None:
        shapes.append(view.attention.first.shape)
        assert torch.equal(elsewhere(lambda: output(model, longer)), expected)

    with Capture(model, found, see, epsilon=0.3).watching():
        forward(ids)
    assert shapes == len(found.sites) * [(2, found.sites[0].heads, 20)]


def test_a_mask_of_another_thread_is_the_whole_one() -> None:
    model, ids = tiny("mistral"), random_ids(1, 40)
    expected = output(model, ids)
    with shadowed(model, never), lazy_masks(1):
        assert torch.equal(elsewhere(lambda: output(model, ids)), expected)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2), (1, 2, 0)])
def test_the_registry_is_put_back_in_any_order(order: tuple[int, ...]) -> None:
    before = registries()
    blocks = [layered(AttentionInterface, {"sdpa": never, "eager": name}) for name in ("a", "b", "c")]
    for block in blocks:
        block.__enter__()
    assert AttentionInterface()["eager"] == "c"
    left = ["a", "b", "c"]
    for place in order:
        blocks[place].__exit__(None, None, None)
        left[place] = ""
        assert AttentionInterface().get("eager", "") == max(left)
    assert registries() == before
    assert AttentionInterface._global_mapping is before[0]


def test_what_is_registered_meanwhile_stays() -> None:
    with layered(AttentionInterface, {"sdpa": never}):
        AttentionInterface.register("of_this_test", never)
        assert "of_this_test" in AttentionInterface().valid_keys()
        AttentionInterface.register("removed", never)
        assert AttentionInterface._global_mapping.pop("removed") is never
        assert "removed" not in AttentionInterface().valid_keys()
    assert "removed" not in AttentionInterface().valid_keys()
    assert AttentionInterface._global_mapping.pop("of_this_test") is never
    assert AttentionInterface()["sdpa"] is not never


@pytest.mark.slow
def test_a_measurement_within_another_finds_sinkscope_s_functions_in_their_place() -> None:
    model, ids = tiny("llama", num_hidden_layers=1), random_ids(1, 20)
    expected = sinkscope.scan(model, data=ids, self_check=False).heads
    with shadowed(model, never):
        assert sinkscope.scan(model, data=ids, self_check=False).heads.equals(expected)


def test_all_is_put_back_after_exceptions_in_two_threads() -> None:
    model, before = tiny("llama"), registries()
    state = hooks(model)

    @contextmanager
    def broken() -> Any:
        with shadowed(model, never):
            raise RuntimeError("stop")
            yield

    def fail() -> None:
        with ExitStack() as stack:
            stack.enter_context(broken())

    for run in (fail, lambda: elsewhere(fail)):
        with pytest.raises(RuntimeError, match="stop"):
            run()
    assert registries() == before
    assert AttentionInterface._global_mapping is before[0]
    assert hooks(model) == state
    with alone("the next one"), alone("and one inside it"):
        pass


def test_a_thread_that_died_in_a_measurement_does_not_keep_the_turn() -> None:
    unfinished: list[Any] = []

    def die() -> None:
        unfinished.append(alone("a measurement that nobody ends"))
        unfinished[0].__enter__()

    elsewhere(die)
    with alone("the next one"):
        pass


def test_a_lookup_of_another_thread_that_outlasts_the_listening_finds_what_it_would_have_found() -> None:
    before = interface_lookup()
    with overheard(never):
        begun = interface_lookup()
        assert begun is not before
        assert elsewhere(lambda: begun(AttentionInterface(), "sdpa", never)) is AttentionInterface()["sdpa"]
    assert interface_lookup() is before
    assert begun(AttentionInterface(), "sdpa", never) is AttentionInterface()["sdpa"]
