"""The lock that threads get in turn, and the hooks that another thread may meet while they are put on."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from sinkscope.capture.hooks import Ears
from sinkscope.capture.turns import Turns


def test_threads_get_it_in_the_order_in_which_they_ask() -> None:
    turns, order, threads = Turns(), list[int](), list[threading.Thread]()

    def ask(number: int) -> None:
        with turns:
            order.append(number)

    with turns, turns:  # taken again by the same thread
        for number in range(4):
            threads.append(threading.Thread(target=ask, args=(number,)))
            threads[-1].start()
            while len(turns._waiting) <= number:
                time.sleep(0.001)
        assert order == []
    for thread in threads:
        thread.join(10)
    assert order == [0, 1, 2, 3]


def test_a_thread_that_takes_it_again_and_again_lets_others_in() -> None:
    turns, stop, rounds = Turns(), threading.Event(), 0

    def again() -> None:
        nonlocal rounds
        while not stop.is_set():
            with turns:
                rounds += 1

    thread = threading.Thread(target=again)
    thread.start()
    for _ in range(20):
        with turns:
            before = rounds
            time.sleep(0.001)
            assert rounds == before
    stop.set()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs a timer that interrupts")
def test_who_is_interrupted_while_it_waits_leaves_the_queue() -> None:
    turns, held, stop = Turns(), threading.Event(), threading.Event()

    def hold() -> None:
        with turns:
            held.set()
            stop.wait(10)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(KeyboardInterrupt):
            turns.acquire()
    finally:
        signal.signal(signal.SIGALRM, before)
    stop.set()
    thread.join(10)
    with turns:
        assert not turns._waiting


def test_no_entry_is_heard_whose_end_would_not_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that runs in another thread at any moment while hooks go on or off tells of no entry alone: the thread
    would keep its turn for ever."""
    model, open_ones = nn.Sequential(nn.Linear(2, 2), nn.Identity()), list[str]()

    def entering(name: str, module: nn.Module) -> Any:
        return lambda *_: open_ones.append(name)

    def leaving(name: str, module: nn.Module) -> Any:
        return lambda *_: open_ones.remove(name) if name in open_ones else None

    def run_elsewhere() -> None:
        thread = threading.Thread(target=model, args=(torch.zeros(1, 2),))
        thread.start()
        thread.join()
        assert open_ones == []

    ears = Ears(model, entering, leaving, anywhere=True)
    for name in ("register_forward_pre_hook", "register_forward_hook"):
        register = getattr(nn.Module, name)

        def between(*given: Any, register: Any = register, **settings: Any) -> Any:
            run_elsewhere()
            handle = register(*given, **settings)
            run_elsewhere()
            remove = handle.remove

            def removed() -> None:
                remove()
                run_elsewhere()

            handle.remove = removed
            return handle

        monkeypatch.setattr(nn.Module, name, between)
    with ears.on():
        run_elsewhere()
    run_elsewhere()
