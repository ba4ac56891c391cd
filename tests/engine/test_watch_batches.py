"""sinkscope.watch over continuous batches: each request is measured as one pass over its prompt and answer."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from same_runs import assert_same
from tiers import slow_but
from transformers import GenerationConfig
from writers import writer

import sinkscope
from sinkscope import SinkscopeError
from sinkscope.capture import generation_doors as doors
from sinkscope.engine.watching.following import MISSED

configuration = pytest.importorskip("transformers", minversion="5.24").ContinuousBatchingConfig

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")
NEW = 8


def prompts(*lengths: int) -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(3, 61, (length,), generator=draw).tolist() for length in lengths]


def answers(model: Any, given: list[list[int]], new: int = NEW, **settings: Any) -> list[list[int]]:
    """What the requests read: prompt and answer without its last token. Pages hold four tokens, a pass 16."""
    settings = {"page_size": 4, "num_blocks": 64, "max_batch_tokens": 16} | settings
    found = model.generate_batch(
        given, generation_config=GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=configuration(**settings), progress_bar=False,
    )  # fmt: skip
    return [(each.prompt_ids + each.generated_tokens)[:-1] for each in found.values()]


def one_by_one(model: Any, read: list[list[int]]) -> sinkscope.Run:
    with torch.no_grad(), sinkscope.watch(model) as seen:
        for ids in read:
            model(torch.tensor([ids]), use_cache=False)
    return seen.run()


def lengths(seen: sinkscope.Watch) -> list[int]:
    """The tokens of each sequence measured so far."""
    return [len(row) for heap in seen._heaps.values() for kind in heap.kinds.values() for row in kind.ids]


def hooks(model: Any) -> list[int]:
    return [len(each._forward_hooks) + len(each._forward_pre_hooks) for each in model.modules()]


@pytest.mark.parametrize("family", slow_but(["llama", "gemma3", "mistral", "gpt_oss"], "llama"))
def test_each_request_gives_the_numbers_of_one_pass(family: str) -> None:
    """Prompts longer than a pass come in pieces, beside the steps of others, over full and sliding layers."""
    model, given = writer(family), prompts(12, 7, 30, 5)
    alone = answers(model, given, 6)
    with sinkscope.watch(model) as seen:
        read = answers(model, given, 6)
    assert read == alone
    assert not seen.left_out
    run = seen.run()
    assert run.summary.sequences == 4
    assert run.manifest.self_check.status == "passed"
    assert run.manifest.warnings == []  # of keywords of transformers' own, among others
    assert_same(run, one_by_one(model, read))
    assert not any(hooks(model))


@pytest.mark.slow
def test_paged_eager_attention_is_read_too() -> None:
    model, given = writer("llama", attn_implementation="eager"), prompts(12, 7)
    with sinkscope.watch(model) as seen:
        read = answers(model, given)
    assert_same(seen.run(), one_by_one(writer("llama"), read))


@pytest.mark.slow
def test_a_request_whose_pages_were_taken_counts_once() -> None:
    """Sixteen pages do not hold four requests: some begin anew, with what they had written."""
    model, given = writer("llama"), prompts(12, 7, 20, 5)
    begun: list[int] = []
    kind, plain = doors.batch_step()

    def noted(batches: Any, model: Any) -> Any:
        begun.extend(tokens for _, before, tokens in doors.requests_of(batches) if not before)
        return plain(batches, model)

    doors.set_batch_step(kind, noted)
    try:
        with sinkscope.watch(model) as seen:
            read = answers(model, given, num_blocks=16)
    finally:
        doors.set_batch_step(kind, plain)
    assert len(begun) > 4
    run = seen.run()
    assert run.summary.sequences == 4
    assert_same(run, one_by_one(model, read))


@pytest.mark.slow
def test_tokens_that_another_request_computed_are_told_of() -> None:
    model, (first, *_) = writer("llama"), prompts(12)
    given = [first, [*first[:8], 3, 4, 5]]
    with sinkscope.watch(model) as seen:
        read = answers(model, given, max_batch_tokens=12)
    assert seen.left_out == [
        "a request of a continuous batch whose first tokens another request computed (allow_block_sharing=False in its "
        "ContinuousBatchingConfig computes them anew; num_return_sequences=1) was not read"
    ]
    measured = seen.run()
    assert measured.summary.sequences == 1
    with sinkscope.watch(model) as seen:
        assert answers(model, given, max_batch_tokens=12, allow_block_sharing=False) == read
    assert not seen.left_out
    assert_same(seen.run(), one_by_one(model, read))


@pytest.mark.slow
def test_every_and_limit_count_requests() -> None:
    model, given = writer("llama"), prompts(12, 7, 9, 5)
    with sinkscope.watch(model, limit=2) as seen:
        read = answers(model, given)
    assert_same(seen.run(), one_by_one(model, sorted(read, key=given_length(given))[:2]))
    with sinkscope.watch(model, every=2) as seen:
        answers(model, given)
    assert seen.sequences == 2


def test_a_request_is_measured_until_it_is_long_enough() -> None:
    model, given = writer("llama"), prompts(12, 7)
    with sinkscope.watch(model, until=10) as seen:
        read = answers(model, given)
    assert not seen.left_out
    assert sorted(lengths(seen)) == [10, 12]
    cut = [ids[: max(10, len(asked))] for asked in given for ids in read if ids[: len(asked)] == asked]
    assert_same(seen.run(), one_by_one(model, sorted(cut, key=len, reverse=True)))


def given_length(given: list[list[int]]) -> Any:
    """The place of a request's prompt in the order in which the prompts are computed: as given."""
    return lambda read: next(number for number, each in enumerate(given) if read[: len(each)] == each)


@pytest.mark.slow
def test_an_error_in_the_middle_leaves_nothing_behind() -> None:
    model, given = writer("llama"), prompts(12, 7)
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 4:
            raise KeyError("in the middle")

    before, step = hooks(model), doors.batch_step()
    broken = model.model.layers[1].mlp.register_forward_hook(fail)
    with sinkscope.watch(model) as seen:
        model.generate_batch(
            given, generation_config=GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1),
            continuous_batching_config=configuration(page_size=4, num_blocks=64, max_batch_tokens=32),
            progress_bar=False,
        )  # fmt: skip
    broken.remove()
    assert hooks(model) == before
    assert doors.batch_step() == step
    assert seen.left_out == ["a pass raised an error: its sequences are measured up to the pass before (2 times)"]
    broken_off = seen.run()
    with sinkscope.watch(model) as seen:
        read = answers(model, given)
    assert_same(seen.run(), one_by_one(model, read))
    assert_same(broken_off, one_by_one(model, [ids[: len(asked) + 2] for ids, asked in zip(read, given, strict=True)]))


@pytest.mark.slow
def test_what_runs_compiled_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = writer("llama"), prompts(12)
    monkeypatch.setattr("sinkscope.capture.batches.replayed", lambda batches: True)
    with sinkscope.watch(model) as seen:
        answers(model, given)
    with pytest.raises(SinkscopeError, match="continuous batches that run compiled, or as CUDA graphs, are not read"):
        seen.run()


@pytest.mark.slow
def test_a_pass_of_the_watching_thread_beside_a_batch_is_heard_whole_or_not_at_all() -> None:
    """The thread of the watch runs the model itself while a batch is under way in another."""
    model, given = writer("llama"), prompts(12, 7, 9)
    ids = torch.tensor(prompts(20))
    done: list[Any] = []
    with torch.no_grad(), sinkscope.watch(model) as seen:
        work = threading.Thread(target=lambda: done.append(answers(model, given, 24)))
        work.start()
        for _ in range(40):
            model(ids, use_cache=False)
        work.join()
    assert set(lengths(seen)) <= {20, *(len(read) for read in done[0])}
    assert lengths(seen).count(20) >= 1


@pytest.mark.slow
def test_a_pass_inside_one_of_a_batch_leaves_it_alone() -> None:
    """The thread of the watch runs a whole pass while the batch's own thread stands before its second layer."""
    model, given = writer("llama"), prompts(12, 7, 9)
    reached, passed = threading.Event(), threading.Event()
    watching = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() != watching and not reached.is_set():
            reached.set()
            assert passed.wait(60)

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    done: list[Any] = []
    with torch.no_grad(), sinkscope.watch(model) as seen:
        work = threading.Thread(target=lambda: done.append(answers(model, given)))
        work.start()
        assert reached.wait(60)
        model(torch.tensor(prompts(20)), use_cache=False)
        passed.set()
        work.join()
    hook.remove()
    assert seen.left_out == [MISSED]
    assert_same(seen.run(), one_by_one(model, done[0]))


@pytest.mark.slow
def test_a_request_whose_last_pass_was_not_heard_is_left_out() -> None:
    """Without its last token it would look whole. The last pass of the longest request runs inside one of the thread of
    the watch."""
    model, given = writer("llama"), prompts(12, 7)
    steps, inside, over = list[int](), threading.Event(), threading.Event()
    watching = threading.get_ident()

    def stop(*_: Any) -> None:
        if threading.get_ident() == watching:
            inside.set()
            assert over.wait(60)

    def work() -> None:
        done.append(answers(model, given[:1], NEW) + answers(model, given[1:], NEW))
        over.set()

    hook = model.model.layers[1].register_forward_pre_hook(stop)
    done: list[Any] = []
    ready = threading.Event()
    with torch.no_grad(), sinkscope.watch(model) as seen:
        kind, plain = doors.batch_step()

        def step(batches: Any, model: Any) -> Any:
            steps.append(1)
            if len(steps) == 2 * NEW:  # a prompt is one pass, and each token but the last another
                ready.set()
                assert inside.wait(60)
            return plain(batches, model)

        doors.set_batch_step(kind, step)
        try:
            thread = threading.Thread(target=work)
            thread.start()
            assert ready.wait(60)
            model(torch.tensor(prompts(20)), use_cache=False)
            thread.join()
        finally:
            doors.set_batch_step(kind, plain)
    hook.remove()
    assert len(steps) == 2 * NEW
    assert seen.left_out == [MISSED]
    assert sorted(lengths(seen)) == sorted([len(done[0][0]), 20])
