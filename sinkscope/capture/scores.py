"""Scores in softmax's place: how a logit becomes attention. A model names one by the keyword `score` of its call.

Declare one of your own in any module, before the model is built or scanned:

    @attention_score("square")
    def square(logits, rows):
        return logits.square() / rows.clamp(min=1)

or by an entry point of the group `sinkscope.attention_scores`, whose name is the score's and whose object is such a
function or a `Score`. The trigger task then trains it: `sinkscope trigger train --attention square`.

Each function takes logits (..., query, key) and the queries' positions i as (query, 1), both from 0 on. It returns the
weight of every key before the mask hides some. With `normalised=True` weights must not be negative, and A is a weight
over the sum of those that the query sees; a row whose weights are all 0 stays 0.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinkscope.capture.private_doors import is_out_of_memory
from sinkscope.errors import SinkscopeError
from sinkscope.lookup import Lookup, a_function

Weigh = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Score:
    """A function from logits (..., query, key) and positions (query, 1) to weights, and whether rows are divided by
    their sum."""

    weigh: Weigh
    normalised: bool = False

    def __call__(self, logits: Tensor, rows: Tensor) -> Tensor:
        return self.weigh(logits, rows)

    def finish(self, weights: Tensor) -> Tensor:
        """A (..., query, key) from weights that are 0 where a key is hidden."""
        if not self.normalised:
            return weights
        total = weights.sum(-1, keepdim=True)
        return weights / total.masked_fill(total == 0, 1.0)


def exponential(logits: Tensor, rows: Tensor) -> Tensor:
    """exp(s_it) / max(i, 1): softmax's numerator over the number of keys that are not the first."""
    return torch.exp(logits) / rows.clamp(min=1)


def relu(logits: Tensor, rows: Tensor) -> Tensor:
    """relu(s_it) / max(i, 1), Ran-Milo 2603.11487. A row may sum to any number from 0 on."""
    return torch.relu(logits) / rows.clamp(min=1)


def sigmoid(logits: Tensor, rows: Tensor) -> Tensor:
    """sigmoid(s_it): each key independent of the others, divided by nothing."""
    return torch.sigmoid(logits)


def even_sigmoid(logits: Tensor, rows: Tensor) -> Tensor:
    """sigmoid(s_it) / max(i, 1)."""
    return torch.sigmoid(logits) / rows.clamp(min=1)


RELU, SIGMOID = Score(relu), Score(sigmoid)
RELU_NORM, SIGMOID_NORM = Score(relu, normalised=True), Score(sigmoid, normalised=True)
EXP_FREE, SIGMOID_FREE = Score(exponential), Score(even_sigmoid)

_HERE = "sinkscope.capture.scores"
SCORES: Lookup[Score | Weigh] = Lookup(
    "the attention score",
    {
        "relu": f"{_HERE}:RELU", "sigmoid": f"{_HERE}:SIGMOID", "relu-norm": f"{_HERE}:RELU_NORM",
        "sigmoid-norm": f"{_HERE}:SIGMOID_NORM", "exp-free": f"{_HERE}:EXP_FREE",
        "sigmoid-free": f"{_HERE}:SIGMOID_FREE",
    },
    group="sinkscope.attention_scores", lacks=a_function,
)  # fmt: skip
"""Every score but softmax, by the name that a model uses."""


def attention_score(name: str, normalised: bool = False) -> Callable[[Weigh], Weigh]:
    """Declares the function as the score `name`. Raises SinkscopeError for a name that is taken; softmax is."""

    def declare(weigh: Weigh) -> Weigh:
        if name == "softmax":
            raise SinkscopeError("the attention score 'softmax' is sinkscope's own: give another name")
        SCORES.add(name, Score(weigh, normalised), weigh.__module__)
        return weigh

    return declare


def score_of(name: str) -> Score:
    """The score of that name. Raises SinkscopeError where there is none, or its package does not load. What it returns
    names one that is not sinkscope's, where it fails."""
    score: Any = SCORES[name]
    score = score if isinstance(score, Score) else Score(score)
    return score if SCORES.ships(name) else replace(score, weigh=partial(_of_others, name, score.weigh))


def _of_others(name: str, weigh: Weigh, logits: Tensor, rows: Tensor) -> Tensor:
    """The weights by a score that is not sinkscope's. Raises SinkscopeError with its name and its package where it
    fails or returns no weight of every key."""
    with SCORES.blaming(name, is_out_of_memory):
        weights: Any = weigh(logits, rows)
        if not isinstance(weights, Tensor) or weights.shape != logits.shape:
            returned = list(weights.shape) if isinstance(weights, Tensor) else type(weights).__name__
            raise TypeError(f"it returned {returned}; a weight for each of {list(logits.shape)} logits is needed")
    return weights


def normalises(name: str) -> bool:
    """Whether rows of that score are divided by their sum, as softmax's are. A score that is unknown here is not."""
    return name == "softmax" or (name in SCORES and score_of(name).normalised)
