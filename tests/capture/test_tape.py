"""What is put off until a step has ended is seen as it was when it happened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from same_runs import assert_same
from tiers import slow_but
from torch import Tensor
from writers import generate, in_one_pass, prompt, writer

import sinkscope
from sinkscope.capture.hearing import CallHearing
from sinkscope.capture.kept import Kept
from sinkscope.capture.tape import Tape

pytestmark = pytest.mark.filterwarnings("ignore:sinkscope. :UserWarning")


def test_events_are_looked_at_in_their_order_and_once() -> None:
    tape, seen = Tape(""), list[int]()
    for number in range(3):
        assert tape.put((torch.zeros(2),), seen.append, number)
    assert not seen
    tape.play(pytest.fail)
    assert seen == [0, 1, 2]


def test_what_was_written_into_in_between_is_known() -> None:
    """Also where it is kept as another view of the same memory, and once it is written into between two events."""
    tape, kept, tensor = Tape(""), list[Kept](), torch.zeros(4)

    def keep(view: Tensor) -> None:
        kept.append(Kept.of(view))

    tape.put((tensor,), lambda: keep(tensor.view(2, 2)))
    tensor.add_(1)
    tape.put((tensor,), lambda: keep(tensor))
    tape.play(pytest.fail)
    assert [each.unwritten is None for each in kept] == [True, False]
    assert Kept.of(tensor).unwritten is tensor, "only while the tape plays"


def test_what_has_to_be_read_or_copied_at_once_is_not_put_off() -> None:
    """A part of a static cache, whose numbers tell whether it is written into, and a tensor of inference mode."""
    whole = torch.zeros(4)
    whole[0] = 1
    with torch.inference_mode():
        inferred = torch.zeros(2)
    assert not Tape("").put((whole[:2],), print)
    assert not Tape("").put((inferred,), print)
    assert Tape("").put((whole, "no tensor"), print)


def test_what_fails_is_told_and_the_rest_is_looked_at() -> None:
    tape, seen, failed = Tape(""), list[int](), list[Exception]()
    tape.put((), seen.append, 1)
    tape.put((), seen.index, 3)
    tape.put((), seen.append, 2)
    tape.play(failed.append)
    assert seen == [1, 2]
    assert [type(error) for error in failed] == [ValueError]


def test_a_sparse_tensor_that_was_written_into_is_not_put_off() -> None:
    sparse = torch.eye(2).to_sparse()
    sparse.mul_(2)
    assert not Tape("").put((sparse,), print)


def late() -> Callable[[Tensor], None]:
    """Writes into what it is given from the eighth time on."""
    times = iter(range(1000))

    def write(tensor: Tensor) -> None:
        if next(times) > 6:
            tensor.mul_(1.5)

    return write


def returned(layer: Any, write: Callable[[Tensor], None]) -> Any:
    return layer.self_attn.register_forward_hook(lambda _, __, output: write(output[0]))


def given(layer: Any, write: Callable[[Tensor], None]) -> Any:
    return layer.register_forward_pre_hook(lambda _, args: write(args[0]))


def given_behind(layer: Any, write: Callable[[Tensor], None]) -> Any:
    return layer.register_forward_hook(lambda _, args, __: write(args[0]))


def heads(layer: Any, write: Callable[[Tensor], None]) -> Any:
    return layer.self_attn.o_proj.register_forward_pre_hook(lambda _, args: write(args[0]))


def replaced(layer: Any, write: Callable[[Tensor], None]) -> Any:
    """Gives the attention module something else than what it was called with."""

    def hook(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kwargs["hidden_states"] = kwargs["hidden_states"].clone()
        write(kwargs["hidden_states"])
        return args, kwargs

    return layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


@pytest.mark.parametrize("family", slow_but(["llama", "gpt2", "gemma3"], "llama"))
@pytest.mark.parametrize("write", [None, returned, given, given_behind, heads, replaced])
def test_a_generation_is_read_as_without(
    write: Callable[..., Any] | None, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model whose hooks write in place into what attention returned, what its block was given, before and behind,
    and what the output projection reads."""
    model = writer(family)
    layer = (model.transformer.h if family == "gpt2" else model.model.layers)[1]
    if family == "gpt2" and write not in (None, given, given_behind):
        pytest.skip("its attention module has other names")
    played = list[int]()
    plain = Tape.play
    monkeypatch.setattr(Tape, "play", lambda tape, fails: played.append(len(tape._events)) or plain(tape, fails))

    def watched() -> tuple[sinkscope.Watch, Tensor]:
        with sinkscope.watch(model) as seen:
            hook = None if write is None else write(layer, late())
            try:
                return seen, generate(model, prompt(4))
            finally:
                if hook is not None:
                    hook.remove()

    seen, written = watched()
    assert len(played) > 4
    monkeypatch.setattr(CallHearing, "_settled", property(lambda self: False))
    count = len(played)
    without, same = watched()
    assert len(played) == count
    assert torch.equal(written, same)
    assert seen.left_out == without.left_out
    if not seen.left_out:
        assert_same(seen.run(), without.run(), atol=0.0)


def test_a_tape_goes_on_while_another_thread_is_in_a_pass_that_is_not_heard() -> None:
    model = writer("llama")
    with sinkscope.watch(model) as seen:
        listener, counts = seen._follower.listener, iter(range(1000))

        def another(*_: object) -> None:
            unheard = next(counts) in (6, 8)
            listener._unheard.update({-1: 1}) if unheard else listener._unheard.pop(-1, 0)

        handle = model.model.layers[1].self_attn.register_forward_pre_hook(another)
        written = generate(model, prompt(4))
        handle.remove()
    assert_same(seen.run(), in_one_pass(model, written, prompt(4)))


def test_a_step_that_raises_leaves_no_tape() -> None:
    model = writer("llama")
    calls = iter(range(100))

    def fail(*_: object) -> None:
        if next(calls) == 5:
            raise ValueError("a hook of somebody else's")

    handle = model.model.layers[1].mlp.register_forward_pre_hook(fail)
    with sinkscope.watch(model) as seen:
        with pytest.raises(ValueError, match="a hook of somebody else's"):
            generate(model, prompt())
        handle.remove()
        assert seen._follower.listener._calls.tape is None
        generate(model, prompt())
    assert seen.left_out == ["a pass raised an error: its sequences are measured up to the pass before"]
    assert seen.run().manifest.sequences_done == 4
