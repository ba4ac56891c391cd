"""Another first token: is it the token that the sink needs, or the place?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from sinkscope.errors import SinkscopeError
from sinkscope.experiments.arms.arm import Arm, Pass, Setting

RANDOM = "random"


@dataclass(frozen=True)
class FirstToken(Arm):
    """The token `text` at position 0 of every sequence; `id` is its number, once the tokenizer has been asked."""

    text: str
    id: int = -1

    @property
    def name(self) -> str:
        return f"first-token:{self.text}"

    @property
    def reads_tokens(self) -> bool:
        return True

    def ready(self, setting: Setting) -> Arm:
        tokenizer = setting.checkpoint.tokenizer
        if tokenizer is None:
            raise SinkscopeError(f"--arm {self.name}: the model has no tokenizer to make a token of the text")
        ids = tokenizer(self.text, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise SinkscopeError(f"--arm {self.name}: the text is {len(ids)} tokens, and one token is replaced")
        if not 0 <= ids[0] < setting.checkpoint.vocabulary:
            raise SinkscopeError(f"--arm {self.name}: the model has no embedding for token {ids[0]}")
        return FirstToken(self.text, ids[0])

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        with _replaced(forward, torch.full_like(forward.ids[:, 0], self.id)):
            yield

    def control(self) -> Arm | None:
        return RandomFirstToken()


@dataclass(frozen=True)
class RandomFirstToken(Arm):
    """A token drawn from the vocabulary, for each sequence, at position 0."""

    @property
    def name(self) -> str:
        return f"first-token:{RANDOM}"

    @property
    def random(self) -> bool:
        return True

    @contextmanager
    def applied(self, forward: Pass) -> Iterator[None]:
        size = forward.setting.checkpoint.vocabulary
        drawn = [int(forward.generator(row).integers(size)) for row in range(len(forward.ids))]
        with _replaced(forward, torch.tensor(drawn, device=forward.ids.device)):
            yield


@contextmanager
def _replaced(forward: Pass, first: torch.Tensor) -> Iterator[None]:
    before = forward.ids
    forward.touches((before[:, 0] != first).double())
    forward.ids = torch.cat([first[:, None], before[:, 1:]], 1)
    try:
        yield
    finally:
        forward.ids = before


def read_first_token(rest: str) -> Arm:
    """Reads what follows `first-token:`."""
    if not rest or any(0xD800 <= ord(letter) < 0xE000 for letter in rest):  # half a character is no text
        raise SinkscopeError("no token is named")
    return RandomFirstToken() if rest == RANDOM else FirstToken(rest)
