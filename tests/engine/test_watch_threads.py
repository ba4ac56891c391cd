"""sinkscope.watch with threads=True: passes of all threads are measured, one after another."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from by_hand import causal
from models import VOCABULARY
from plain_models import plain, tokens
from same_runs import assert_same
from torch import Tensor
from watched import hooks

import sinkscope
from sinkscope.engine.watching.program import Everywhere

WRITTEN = 24


def side_by_side(*works: Callable[[], object]) -> None:
    """Runs each in a thread of its own, all at the same time. An error in one of them is raised here."""
    start, errors = threading.Barrier(len(works)), list[BaseException]()

    def run(work: Callable[[], object]) -> None:
        start.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "it waits for a turn that never comes"
    if errors:
        raise errors[0]


def prompt(seed: int, length: int = 12) -> Tensor:
    return torch.randint(3, VOCABULARY, (1, length), generator=torch.Generator().manual_seed(seed))


def writing(model: Any, given: Tensor, into: dict[int, Tensor], **settings: Any) -> Callable[[], None]:
    def write() -> None:
        into[int(given[0, 1])] = model.generate(
            given, max_new_tokens=WRITTEN, min_new_tokens=WRITTEN, do_sample=False, pad_token_id=0, **settings
        )

    return write


def test_a_pass_of_another_thread_is_measured() -> None:
    model = plain()
    before = hooks(model)
    with torch.no_grad(), sinkscope.watch(model, threads=True) as seen:
        side_by_side(lambda: model(tokens()))
    assert hooks(model) == before
    assert_same(seen.run(), sinkscope.scan(model, data=tokens()))


@pytest.mark.parametrize("beams", [1, 2])
def test_generations_side_by_side_are_those_of_single_passes(beams: int) -> None:
    """Their steps take turns in any order; each goes on over its own cache."""
    model, alone, watched = causal("gemma3"), dict[int, Tensor](), dict[int, Tensor]()
    prompts = [prompt(seed, 10 + seed) for seed in range(3)]
    settings = {"num_beams": beams, "num_return_sequences": beams}
    for given in prompts:
        writing(model, given, alone, **settings)()
    with sinkscope.watch(model, threads=True) as seen:
        side_by_side(*(writing(model, given, watched, **settings) for given in prompts))
    assert alone.keys() == watched.keys()
    assert all(torch.equal(alone[key], watched[key]) for key in alone)
    assert seen.left_out == []
    run = seen.run()
    assert run.summary.sequences == 3 * beams
    if beams == 1:
        scans = [sinkscope.scan(model, data=text[:, :-1]).heads["bos_mass"] for text in watched.values()]
        np.testing.assert_allclose(run.heads["bos_mass"], np.mean(scans, axis=0), atol=1e-6)


def test_a_pass_of_a_thread_that_is_not_watched_is_told_of() -> None:
    model = plain()
    with sinkscope.watch(model) as seen:
        model(tokens())
        assert not seen.left_out
        side_by_side(lambda: model(tokens()))
    why = ["passes in other threads were not measured: watch all threads (threads=True, or --threads)"]
    assert seen.left_out == seen.run().manifest.warnings == why
    seen.reset()
    assert not seen.left_out


def test_an_error_in_one_thread_ends_its_turn() -> None:
    model, made = plain(), list[int]()

    def fail(*_: Any) -> None:
        if threading.current_thread().name == "failing":
            raise KeyError("in the middle")

    def failing() -> None:
        threading.current_thread().name = "failing"
        with pytest.raises(KeyError):
            model(tokens())

    def passing() -> None:
        for seed in range(8):
            model(tokens(seed=seed))
            made.append(seed)

    hook = model.blocks[1].register_forward_hook(fail)
    before = hooks(model)
    with torch.no_grad(), sinkscope.watch(model, threads=True) as seen:
        side_by_side(failing, passing, failing, passing)
    assert hooks(model) == before
    hook.remove()
    assert len(made) == 16
    data = torch.cat([tokens(seed=seed) for seed in range(8)])
    np.testing.assert_allclose(
        seen.run().heads["bos_mass"], sinkscope.scan(model, data=data).heads["bos_mass"], atol=1e-6
    )


def test_a_thread_that_outlives_the_block_goes_on() -> None:
    model, stop, passes = plain(), threading.Event(), list[int]()

    def run() -> None:
        with torch.no_grad():
            while not stop.is_set():
                model(tokens())
                passes.append(1)

    before, threads = hooks(model), [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        with sinkscope.watch(model, threads=True) as seen:
            count = len(passes)
            while len(passes) < count + 4:
                time.sleep(0.001)
        assert seen.sequences >= 2
    stop.set()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert hooks(model) == before


def test_a_program_s_threads_are_watched_where_that_is_asked_for() -> None:
    model, other, everywhere = plain(), plain("product"), Everywhere(threads=True)
    with torch.no_grad(), everywhere.watching():
        side_by_side(lambda: model(tokens()), lambda: other(tokens()))
        model(tokens(seed=1))
    assert {seen.model: seen.sequences for seen in everywhere.measured} == {model: 4, other: 2}
    with torch.no_grad(), (everywhere := Everywhere()).watching():
        side_by_side(lambda: model(tokens()))
    assert everywhere.measured == []
