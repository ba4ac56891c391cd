"""Solutions of the task in closed form: weights written down, not trained. One layer, each head with W_O = identity.

The three marks of a token (BOS, trigger, ordinary) sum to 1, so that a score or a value may depend on them without a
bias. b stands for a logit, i for a row, j for the trigger's.

- relu, 1 head, zero: A[j,t] = 1/j on t = 1 .. j, all other rows empty. Zero loss at every length, no sink. (Theorem 3.)
- relu, 2 heads, zero or constant: head 1 is that; head 2 has A[i,t] = 1/i on t = 1 .. i where i is ordinary, A[0,0] = 1
  in row 0, and the value c for every token. Zero loss at every length, no sink.
- softmax, 1 head, zero or constant: logit b on BOS in ordinary rows and -b in the trigger's, 0 on all other keys; BOS
  has the value c. A[i,0] = e^b / (e^b + i), a sink, and A[j,0] = e^-b / (e^-b + j).
- softmax, 2 heads, zero or constant: logit -b on BOS in every row of head 2 and in ordinary rows of head 1, +b in head
  1's trigger row. In ordinary rows both heads are alike and spread, A[i,0] = e^-b / (e^-b + i), and their values sum to
  c; in the trigger's row head 1 is off. No head has a sink where no trigger stands.

ReLU's are exact but for rounding. A softmax never is exact: b is chosen so that no input of the length given, nor of a
shorter one, has a larger absolute error than `error`. Rounding in float32 adds about 1e-6.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from sinkscope.errors import SinkscopeError
from sinkscope.trigger import task
from sinkscope.trigger.model import TriggerConfig, TriggerModel
from sinkscope.trigger.saving import making, saving
from sinkscope.trigger.task import ZERO, Default, draw_default

ERROR, SMALLEST_ERROR = 1e-3, 1e-5
"""The largest error by default, and the smallest one that float32 can keep."""


def explicit(
    attention: str = "relu",
    heads: int = 1,
    default: Default = ZERO,
    dim: int = 16,
    length: int = 16,
    error: float = ERROR,
) -> TriggerModel:
    """Returns the model of the docstring above. `error` bounds a softmax's largest absolute error; ReLU has none.

    Raises SinkscopeError where there is no such solution, or none in closed form here.
    """
    _check(attention, heads, default, error)
    values = None if default.values is None else default.values.tolist()
    config = TriggerConfig(attention, dim, length, 1, heads, default=default.kind, default_values=values)
    model, constant = TriggerModel(config), default.rows(torch.zeros(1, 1, dim))[0, 0]
    parts = _relu_heads(heads, constant) if attention == "relu" else _softmax_heads(heads, constant, length, error)
    layer = model.layers[0].self_attn
    with torch.no_grad():
        for name, blocks in zip(("q_proj", "k_proj", "v_proj"), zip(*parts, strict=True), strict=True):
            getattr(layer, name).weight.copy_(torch.cat(blocks))
        layer.o_proj.weight.copy_(torch.eye(dim).repeat(1, heads))
    return model.eval()


def explicit_relu(dim: int = 16, length: int = 16) -> TriggerModel:
    """One ReLU head with zero loss and no sink: score x_i[1] * (1 - x_t[0]), W_V = W_O = identity."""
    return explicit(dim=dim, length=length)


def write_explicit(
    folder: Path,
    attention: str = "relu",
    heads: int = 1,
    default: str = "zero",
    dim: int = 16,
    length: int = 16,
    seed: int = 0,
    error: float = ERROR,
) -> TriggerModel:
    """Writes such a model as a transformers folder that `scan` reads; `seed` draws c, as in training.

    Raises SinkscopeError as `explicit` does, and where the folder is not empty or cannot be written.
    """
    task.check_seed(seed)
    task.check_sizes(dim, length)
    model = explicit(attention, heads, draw_default(default, dim, seed), dim, length, error)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise SinkscopeError(f"{folder} is a file or not empty: give another folder")
    bound = f" --error {error:g}" if attention == "softmax" else ""
    command = (
        f"sinkscope trigger explicit --attention {attention} --heads {heads} --default {default} --dim {dim} "
        f"--length {length} --seed {seed}{bound}"
    )
    model.config.training = {"command": command, "seed": seed, "steps": 0, "stopped": "explicit"}
    with making(folder), saving(folder):
        model.save_pretrained(folder)
    return model


def sink_logit(length: int, constant: float, error: float, heads: int = 1) -> float:
    """The logit b of softmax heads, so that no row errs by more than `error`; `constant` is the largest |c|.

    No coordinate of x_t - c is larger than 1 + |c|. One head errs in row i by |sum_t (x_t - c)| / (e^b + i), at most
    i (1 + |c|) / (e^b + i), which is largest in the last row; in the trigger's row by less. Two heads err in the
    trigger's row alone: head 1 by that with i = j, head 2 by less than head 1, so half of `error` is for each.
    """
    return math.log(heads * (length - 1) * (1 + constant) / error)


def _check(attention: str, heads: int, default: Default, error: float) -> None:
    if attention not in ("relu", "softmax"):
        raise SinkscopeError(f"no solution in closed form for {attention!r}: give --attention relu or softmax")
    if heads not in (1, 2):
        raise SinkscopeError(f"heads {heads}: the solutions in closed form have 1 or 2")
    if default.kind == "self":
        raise SinkscopeError("default self has no solution with one layer: give --default zero or constant")
    if attention == "relu" and heads == 1 and default.kind == "constant":
        raise SinkscopeError("default constant has no solution with one ReLU head: pass --heads 2")
    if attention == "softmax" and not SMALLEST_ERROR <= error < 1:
        raise SinkscopeError(f"error {error:g}: one of {SMALLEST_ERROR:g} to below 1 is needed")


Head = tuple[Tensor, Tensor, Tensor]
"""W_Q, W_K, W_V of one head, each [d, d]."""


def _head(value: Tensor, *scores: tuple[float, tuple[int, ...], tuple[int, ...]]) -> Head:
    """A head whose logit is the sum of `scores`: (logit, marks of the query, marks of the key) each."""
    query, key = torch.zeros_like(value), torch.zeros_like(value)
    for row, (logit, query_marks, key_marks) in enumerate(scores):
        query[row, list(query_marks)] = logit
        key[row, list(key_marks)] = 1
    return query, key, value


def _values(constant: Tensor, sign: float, tokens: float, bos: float) -> Tensor:
    """W_V with W_V x_t = sign * x_t + tokens * c for t >= 1, and bos * c for BOS."""
    value = sign * torch.eye(len(constant))
    value[:, task.BOS] = bos * constant
    for mark in (task.TRIGGER, -1):
        value[:, mark] += tokens * constant
    return value


def _relu_heads(heads: int, constant: Tensor) -> list[Head]:
    last = len(constant) - 1
    rest = (task.TRIGGER, last)
    if heads == 1:
        return [_head(_values(constant, 1, 0, 0), (1, (task.TRIGGER,), rest))]
    return [
        *_relu_heads(1, constant),
        _head(_values(constant, 0, 1, 1), (1, (last,), rest), (1, (task.BOS,), (task.BOS,))),
    ]


def _softmax_heads(heads: int, constant: Tensor, length: int, error: float) -> list[Head]:
    last, logit = len(constant) - 1, sink_logit(length, float(constant.abs().max()), error, heads)
    bos = (task.BOS,)
    if heads == 1:
        return [_head(_values(constant, 1, 0, 1), (logit, (last,), bos), (-logit, (task.TRIGGER,), bos))]
    return [
        _head(_values(constant, -1, 1, 0), (-logit, (last,), bos), (logit, (task.TRIGGER,), bos)),
        _head(_values(constant, 1, 0, 1), (-logit, (task.TRIGGER, last), bos)),
    ]
