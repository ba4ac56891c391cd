"""Hears every attention call of a model that somebody else runs, and changes none.

The model's own functions compute its attention: outputs and gradients are those of the model alone. What passes by is
kept until the pass has ended, and measured then.
"""

from __future__ import annotations

import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from threading import Lock, get_ident
from typing import Any

from torch import Tensor, nn

from sinkscope.capture.alone import measuring
from sinkscope.capture.axes import channels_last, hidden_given
from sinkscope.capture.batches import Requests, continuous_batches
from sinkscope.capture.frames import Frame, Frames
from sinkscope.capture.given import given_digests
from sinkscope.capture.growth import Growth, cache_growth
from sinkscope.capture.heard import (
    TOLD,
    Pass,
    Share,
    cache_given,
    cache_returned,
    pass_of,
)  # fmt: skip
from sinkscope.capture.hearing import CallHearing
from sinkscope.capture.hooks import Ears, first_returned
from sinkscope.capture.inline.calls import turned_fold
from sinkscope.capture.inline.mode import is_function
from sinkscope.capture.listeners import overheard
from sinkscope.capture.own_cache import may_go_on
from sinkscope.capture.padded import Padding, given_by_place
from sinkscope.capture.private_doors import in_backward, without_numbers
from sinkscope.capture.registries import uncompiled
from sinkscope.capture.tape import Tape
from sinkscope.capture.turns import Turns
from sinkscope.capture.uncalled import uncalled_around
from sinkscope.errors import SinkscopeError, in_one_line


class Listener:
    """Hears the passes of `model` while `listening()`.

    `begins(pass)` is asked before each pass whether it is wanted; `ended(pass)` gets each wanted one, also one that
    raised an error (`failed`); `unheard(why)` is told of passes that cannot be heard. `keywords` gets the unknown
    keywords. One thread is heard at a time: the one that listens, and that of a continuous batch while it runs a pass.
    `lock` is held for such a pass. `missed` gets the caches of the passes that were not heard since another thread's
    was; None for a pass without a cache. `along` makes what else listens in each thread that is heard. `elsewhere`:
    whether some other thread ran the model.

    `anywhere`: passes of all threads are heard. They take turns: one begins when the one before it is measured.
    """

    def __init__(
        self, model: nn.Module, begins: Callable[[Pass], bool], ended: Callable[[Pass, bool], None],
        unheard: Callable[[str], None], along: Sequence[Callable[[], AbstractContextManager[None]]] = (),
        anywhere: bool = False,
    ) -> None:  # fmt: skip
        self.model, self._begins, self._ended, self._tell = model, begins, ended, unheard
        self._along, self._anywhere = along, anywhere
        self._joined: set[int] = set()
        self.elsewhere = False
        self._holds = False
        self.missed: list[weakref.ref[Any] | None] = []
        self._frames = Frames()
        self._calls = CallHearing(model, self._keep_given)
        self._inputs: tuple[tuple[Any, ...], dict[str, Any]] = (), {}
        self._error: BaseException | None = None
        self.lock, self._gate = Turns(), Lock()
        self._home = self._thread = 0
        self._ears: dict[int, Ears] = {}
        self._unheard = Counter[int]()
        self._stack: ExitStack | None = None
        self._rests = False
        self._requests = Requests()
        self._shares: list[Share] | None = None

    @property
    def keywords(self) -> dict[str, str]:
        """The unknown keywords of transformers' interface, each with the first module that was given it."""
        return self._calls.keywords

    def rest(self) -> None:
        """Takes the hooks off the modules before `listening` ends: no later pass is heard, and none costs anything."""
        self._rests = True
        for ears in self._ears.values():
            ears.off()

    def resume(self) -> None:
        """Hears passes again after a rest."""
        if self._rests:
            self._rests = False
            self._ears.clear()
            self._hook()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hears every pass in this thread until the block ends. No hook is left behind, also after an exception."""
        self._calls.learn_names()
        with ExitStack() as stack:
            stack.callback(self._end_all)
            stack.enter_context(uncompiled(self.model))
            stack.enter_context(continuous_batches(self._batch))
            self._stack, self._home = stack, get_ident()
            self._thread = self._home
            self._join(stack)
            self._hook()
            yield

    def _join(self, stack: ExitStack) -> None:
        """Listens in this thread, once, to what is done beside the modules."""
        if get_ident() not in self._joined:
            self._joined.add(get_ident())
            stack.enter_context(overheard(self._wrapped))
            stack.enter_context(cache_growth(self._grew))
            for listening in self._along:
                stack.enter_context(listening())

    def _hook(self) -> None:
        """Puts hooks on for this thread, once."""
        if self._ear not in self._ears and self._stack is not None and not self._rests:
            others = self._called_elsewhere if self._ear == self._home else None
            ears = self._ears[self._ear] = Ears(self.model, self._entering, self._leaving, self._anywhere, others)
            self._stack.enter_context(ears.on())

    def _called_elsewhere(self) -> None:
        """Notes that a thread ran the model which is not listened to."""
        if get_ident() not in self._joined and not self.elsewhere and not measuring():
            self.elsewhere = True

    @property
    def _ear(self) -> int:
        """The thread whose hooks are called in this one."""
        return self._home if self._anywhere else get_ident()

    def _end_all(self) -> None:
        self._stack, self._requests, self._shares, self._rests = None, Requests(), None, False
        self._ears.clear()
        self._joined.clear()
        self._reset()
        self._thread = 0  # a pass that waits for its turn is not heard
        self._unheard.clear()

    def _take_turn(self, name: str) -> None:
        """Waits until no pass of another thread is heard, and hears this one from here on, if anyone still listens."""
        if self._thread == get_ident() and self._frames:
            if name or self._frames.outermost:
                return
            self._reset()
        self.lock.acquire()
        if self._stack is None:
            self.lock.release()
            return
        self._holds, self._thread = True, get_ident()
        self._join(self._stack)

    def _give_turn(self) -> None:
        if self._holds:
            self._holds = False
            self.lock.release()

    @contextmanager
    def _batch(self, batches: Any, model: nn.Module) -> Iterator[None]:
        """Hears one pass of a continuous batch, in whatever thread it runs, until the block ends."""
        with ExitStack() as stack:
            stack.enter_context(self.lock)
            if self._turn_to(batches, model):
                stack.callback(self._turn_back)
                assert self._stack is not None
                self._join(self._stack)
                self._hook()
            else:
                stack.close()
            yield

    def _turn_to(self, batches: Any, model: nn.Module) -> bool:
        """Hears this thread from here on. Returns False, and does not, where a pass is under way in the other one."""
        if self._stack is None or self._rests or model not in self._calls.names:
            return False
        try:
            shares = self._requests.of(batches)
        except SinkscopeError as error:
            self._tell(str(error))
            return False
        with self._gate:
            if self._frames:
                self.missed.extend(weakref.ref(share.pages) for share in shares)
                return False
            self._thread, self._shares = get_ident(), shares
        return True

    def _turn_back(self) -> None:
        if self._frames:
            self._reset()
        self._thread, self._shares = self._home, None

    def _reset(self) -> None:
        """Ends a pass that an interruption (Ctrl-C) cut off: torch calls no hook then."""
        self._frames.clear()
        self._inputs = (), {}
        self._calls.end()
        self._give_turn()

    # modules

    def _entering(self, name: str, module: nn.Module) -> Callable[..., None]:
        function, last = is_function(name, module), channels_last(module)
        bare = next(module.parameters(), None) is None
        blocks = uncalled_around(self.model, name)

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._anywhere:
                self._take_turn(name)
            if (tape := self._tape_for(name)) is not None:
                given = hidden_given(args, kwargs)  # a hook of others may put another one in their place
                if not blocks and tape.put(args[:1], look, args, kwargs, given):
                    tape.enters(given)
                    return
                self._calls.play()
            with self._gate:
                if self._elsewhere(1, name):
                    if get_ident() == self._home and self._unheard[self._home] == 1 and not measuring():
                        self._miss(kwargs)
                    return
                if self._frames and name == self._frames.outermost == "":
                    self._reset()
                outermost = not self._frames
                if blocks and self._calls.now is not None:
                    self._frames.enter_uncalled(blocks, name, hidden_given(args, kwargs), self._calls.now)
                frame = self._frames.push(name, bare)
            if outermost:
                self._begin(name, args, kwargs)
            given = hidden_given(args, kwargs)
            if outermost and self._calls.tape is not None:
                self._calls.tape.enters(given)
            look(args, kwargs, given, frame)

        def look(args: tuple[Any, ...], kwargs: dict[str, Any], given: Any, frame: Frame | None = None) -> None:
            frame = frame or self._frames.push(name, bare)
            now = self._calls.now
            if now is None:
                return
            frame.given = given
            if now.idle is None:  # of steps, nothing is asked that this would tell
                frame.inputs = args, kwargs
                if not blocks:
                    now.entered.add(name)
                if not function:
                    self._calls.torch_calls.entered(name, frame.given)
            if last is not None:
                self._frames.tell_axis(name, frame.given, last)
            frame.joint = isinstance(kwargs.get("encoder_hidden_states"), Tensor)
            frame.first = len(now.heard)
            if args and isinstance(args[0], Tensor):
                self._calls.keep_read(name, args[0], last is True)

        return enter

    def _leaving(self, name: str, module: nn.Module) -> Callable[..., None]:
        function = is_function(name, module)

        def leave(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            if (tape := self._tape_for(name)) is not None:
                if tape.put((first_returned(output),), look, module, args, kwargs, output):
                    return
                self._calls.play()
            if self._elsewhere(-1, name):
                return
            if self._frames and name == self._frames.outermost:
                self._calls.play()
            if look(module, args, kwargs, output) and not self._frames:
                try:
                    self._end(output)
                finally:
                    self._give_turn()

        def look(module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> bool:
            now = self._calls.now
            frame = self._frames.pop(name, now)
            if frame is not None and now is not None:
                self._calls.keep_returned(name, module, args, kwargs, output)
                if not function and now.idle is None:
                    self._calls.torch_calls.left()
                if len(now.heard) > frame.first:
                    now.around.append(frame.around(len(now.heard), output))
            return frame is not None

        return leave

    def _tape_for(self, name: str) -> Tape | None:
        """The tape of the pass that runs, where the module at `name` is one inside of it."""
        tape = self._calls.tape
        thread = get_ident()
        return None if tape is None or name == tape.root or thread != self._thread or thread in self._unheard else tape

    def _elsewhere(self, change: int, name: str) -> bool:
        """Whether another thread is heard than this one, or was when the outermost module of this one was called.

        `change`: 1 where the module at `name` is entered, -1 where it is left.
        """
        thread = get_ident()
        if thread == self._thread and not self._unheard:
            return False
        open_ones = 0 if name == "" and change > 0 else self._unheard.pop(thread, 0)
        if thread == self._thread and not open_ones:
            return False
        if open_ones + change > 0:
            self._unheard[thread] = open_ones + change
        return True

    def _miss(self, kwargs: dict[str, Any]) -> None:
        """Notes a pass of the listening thread that begins while the other one is heard."""
        cache = cache_given(kwargs)
        self.missed.append(None if cache is None else weakref.ref(cache))

    # passes

    def _begin(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            self._hear(name, args, kwargs)
        except Exception as error:  # whatever it is, the pass is somebody else's and goes on
            self._tell(f"a pass was not read: {in_one_line(error)}")

    def _hear(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if measuring() or in_backward():  # activation checkpointing computes a block again
            return
        if without_numbers():
            self._tell("a pass that torch traced or transformed (torch.jit, torch.export, torch.func) was not read")
            return
        now = pass_of(name, args, given_by_place(self.model.get_submodule(name), args, TOLD) | kwargs)
        now.shares, self._shares = self._shares, None
        if not self._begins(now):
            return
        self._inputs = args, kwargs
        if now.resumes is None and not now.asked:
            now.given = self._digests(now, *self._inputs)
        later = now.cache is not None and now.before > 0
        try:
            now.padding = Padding() if later else Padding.of(now.masks_of_tokens, now.ids is not None)
        except ValueError as error:
            now.refused = str(error)
        self._error = sys.exc_info()[1]
        ears = self._ears[self._ear]
        if not later and ears.renewed():
            self._calls.learn_names()
        now.changes = self._calls.changes
        ears.without(now.idle or frozenset())
        self._calls.begin(now)

    def _end(self, output: Any) -> None:
        now = self._calls.end()
        if now is None:
            return
        inputs, self._inputs = self._inputs, ((), {})
        try:
            self._complete(now, inputs, output)
        except Exception as error:  # as in `_begin`
            now.refused = in_one_line(error)
        self._ended(now, sys.exc_info()[1] is not self._error)
        self._error = None

    def _complete(self, now: Pass, inputs: tuple[tuple[Any, ...], dict[str, Any]], output: Any) -> None:
        """Adds what only the end of a pass tells."""
        if now.resumes is not None:
            now.given = self._given_beside_cache(now, *inputs)
        if now.cache is None:
            now.cache = cache_returned(output)
        if now.cache is None and now.shares is None:
            now.keeps = partial(may_go_on, self.model, now, inputs, output)
        unknown = next((heard.shown for heard in now.heard if heard.folded), None)
        if unknown is not None and now.refused is None:
            now.refused = turned_fold(unknown, False)

    def _given_beside_cache(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bytes] | None:
        """What a pass was given. Where it goes on over a cache of the model's own, its lists of tensors are this cache,
        which the earlier passes tell."""
        if now.cache is None:
            return self._digests(now, args, kwargs)
        if now.ids is not None:
            return None
        tensors = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
        return self._digests(now, tuple(value for value in args if isinstance(value, Tensor)), tensors)

    def _digests(self, now: Pass, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[bytes] | None:
        seq2seq = bool(getattr(getattr(self.model, "config", None), "is_encoder_decoder", False))
        return given_digests(args, kwargs, now.batch, now.ids is not None, seq2seq)

    # attention calls

    def _wrapped(self, name: str | None, function: Callable[..., Any]) -> Callable[..., Any]:
        return self._calls.wrapped(name, function) if get_ident() == self._thread else function

    def _grew(self, growth: Growth) -> None:
        if get_ident() == self._thread:
            self._calls.grew(growth)

    def _keep_given(self) -> None:
        """Keeps what surrounds the next attention call."""
        if self._calls.now is not None:
            self._frames.attends(self._calls.now)
