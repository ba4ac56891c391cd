"""Brute-force float64 reference for the tests: each column's definition, spelled out in numpy.

It shares no code with the package. It forms every attention map whole, head by head, and is slow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.pytorch_utils import Conv1D

Array = np.ndarray


@dataclass
class Reference:
    """What `measure` found: N sequences, L layers, H query heads, T positions."""

    heads: dict[str, Array]  # column -> [N, L, H]
    sizes: dict[str, Array]  # column that is a difference -> size of what is subtracted, [N, L, H]
    layers: dict[str, Array]  # column -> [N, L]
    run_layers: dict[str, Array]  # column -> [L], over all sequences at once
    alpha: Array  # [N, L, H, T]
    alpha_t64: Array | None  # [N, L, H, 64], None where T < 64
    peak_position: Array  # [L, H], int
    peak_score: Array  # [L, H]
    attentions: list[Array]  # per layer [N, H, T, T]
    hidden: Array  # [N, T, D], the model's last hidden state
    sinks: list[tuple[Any, ...]]  # (sequence, layer, *row of `sinks`), in any order


@dataclass
class AttentionCall:
    """One attention call on one sequence, in float64. H query heads, G key/value heads."""

    query: Array  # [H, T, d]
    key: Array  # [G, T, d]
    value: Array  # [G, T, dv]
    logits: Array  # [H, T, T]: after scaling, soft-cap and bias, before masking
    visible: Array  # [H, T, T] bool: which keys a query may see
    sink_logits: Array | None  # [H], the learned sink
    probs: Array  # [H, T, T]
    output: Array  # [H, T, dv]


@dataclass
class Trace:
    """What one forward pass of one sequence recorded of one layer."""

    call: AttentionCall | None = None
    x: Array | None = None  # [T, D], entering the block
    z: Array | None = None  # [T, D], entering the attention module
    e: Array | None = None  # [T, D], leaving the block
    w: Array | None = None  # [T, H * dv], entering the output projection


@dataclass
class Layer:
    """The modules of one attention layer."""

    attention: nn.Module
    block: nn.Module
    projection: nn.Module
    trace: Trace = field(default_factory=Trace)


# ---------------------------------------------------------------------------------------------------------
# The attention call


def to_numpy(tensor: torch.Tensor) -> Array:
    """A float64 copy."""
    return tensor.detach().cpu().to(torch.float64).numpy().copy()


def split_mask(mask: torch.Tensor | None, causal: bool, shape: tuple[int, int, int]) -> tuple[Array, Array]:
    """(visible, bias), both of `shape` [H, Tq, Tk].

    A float mask blocks where it is at (or near) its dtype's minimum; elsewhere it is a bias.
    """
    if mask is None:
        visible = np.ones(shape, dtype=bool)
        if causal:
            for i in range(shape[1]):
                visible[:, i, i + 1 :] = False
        return visible, np.zeros(shape)
    if mask.ndim != 4 or mask.shape[0] != 1:
        raise ValueError(f"unexpected mask shape {tuple(mask.shape)}")
    if mask.dtype == torch.bool:
        return np.broadcast_to(mask[0].numpy(), shape).copy(), np.zeros(shape)
    values = np.broadcast_to(to_numpy(mask[0]), shape)
    visible = values > torch.finfo(mask.dtype).min / 2
    return visible, np.where(visible, values, 0.0)


def softmax_row(logits: Array, visible: Array, sink_logit: float | None) -> Array:
    """Softmax of one row over its visible keys; a learned sink only joins the denominator."""
    entries = logits[visible]
    everything = entries if sink_logit is None else np.append(entries, sink_logit)
    top = everything.max()
    row = np.zeros(len(logits))
    row[visible] = np.exp(entries - top) / np.exp(everything - top).sum()
    return row


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    causal: bool,
    scaling: float | None = None,
    softcap: float | None = None,
    sink_logits: torch.Tensor | None = None,
) -> AttentionCall:
    """Computes one attention call of [1, heads, T, d] tensors, with all that the columns need of it."""
    if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
        raise ValueError("the reference takes one sequence at a time and no cache")
    q, k, v = to_numpy(query[0]), to_numpy(key[0]), to_numpy(value[0])
    heads, length, width = q.shape
    group = heads // len(k)
    visible, bias = split_mask(mask, causal, (heads, length, length))
    if not visible.any(axis=2).all():
        raise ValueError("a query that sees no key")
    sinks = None if sink_logits is None else to_numpy(sink_logits).reshape(heads)
    logits = np.zeros((heads, length, length))
    probs = np.zeros((heads, length, length))
    output = np.zeros((heads, length, v.shape[2]))
    for h in range(heads):
        s = (q[h] @ k[h // group].T) * (width**-0.5 if scaling is None else scaling)
        if softcap is not None:
            s = np.tanh(s / softcap) * softcap
        logits[h] = s + bias[h]
        for i in range(length):
            sink = None if sinks is None else sinks[h]
            probs[h, i] = softmax_row(logits[h, i], visible[h, i], sink)
        output[h] = probs[h] @ v[h // group]
    return AttentionCall(q, k, v, logits, visible, sinks, probs, output)


# ---------------------------------------------------------------------------------------------------------
# Getting at the model


@contextmanager
def attention_replaced(handler: Callable[[nn.Module, AttentionCall], None]) -> Iterator[None]:
    """Answer every dispatched attention call with `attend` and show it to `handler`."""

    def function(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        is_causal: bool | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        for name in ("position_bias", "sinks", "indices", "block_indices"):
            if kwargs.get(name) is not None:
                raise NotImplementedError(f"the reference does not know `{name}`")
        if dropout:
            raise ValueError("the model must be in eval mode")
        causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
        call = attend(query, key, value, attention_mask, causal, scaling, softcap, s_aux)
        handler(module, call)
        output = torch.from_numpy(call.output).to(query.dtype)  # [H, T, dv]
        return output.transpose(0, 1).unsqueeze(0).contiguous(), None

    # Assigning on the instance shadows the class-wide table, which stays as it is.
    own = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = {name: own[name] for name in ("sdpa", "eager") if name in own}
    try:
        for name in ("sdpa", "eager"):
            ALL_ATTENTION_FUNCTIONS[name] = function
        yield
    finally:
        for name in ("sdpa", "eager"):
            if name in before:
                ALL_ATTENTION_FUNCTIONS[name] = before[name]
            else:
                own.pop(name, None)


def find_layers(base: nn.Module, input_ids: torch.Tensor) -> list[Layer]:
    """The attention layers, in the order in which one forward pass calls them."""
    called: list[nn.Module] = []
    with torch.no_grad(), attention_replaced(lambda module, call: called.append(module)):
        base(input_ids=input_ids, use_cache=False)
    if len(set(called)) != len(called):
        raise ValueError("an attention module called twice in a pass")
    names = {module: name for name, module in base.named_modules()}
    return [
        Layer(module, owning_block(base, names[module]), output_projection(base, names[module])) for module in called
    ]


def owning_block(base: nn.Module, name: str) -> nn.Module:
    """The nearest ancestor of the module `name` that is an element of a ModuleList."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        if isinstance(base.get_submodule(".".join(parts[: end - 1])), nn.ModuleList):
            return base.get_submodule(".".join(parts[:end]))
    raise ValueError(f"no block holds {name}")


def output_projection(base: nn.Module, name: str) -> nn.Module:
    """The output projection of the attention module `name`; BERT keeps it in the sibling `output.dense`."""
    attention = base.get_submodule(name)
    for own in ("o_proj", "dense", "c_proj"):
        if hasattr(attention, own):
            return getattr(attention, own)
    return base.get_submodule(name.rpartition(".")[0]).get_submodule("output.dense")


def projection_matrix(projection: nn.Module) -> Array:
    """W_O as [out, in]."""
    weight = to_numpy(projection.weight)
    return weight.T if isinstance(projection, Conv1D) else weight


@contextmanager
def residual_hooks(layers: list[Layer]) -> Iterator[None]:
    """Record x, z, w and e of every layer into its trace."""

    def first_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Array:
        return to_numpy((args[0] if args else kwargs["hidden_states"])[0])

    def before(layer: Layer, attribute: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            setattr(layer.trace, attribute, first_input(args, kwargs))

        return hook

    def after(layer: Layer) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            layer.trace.e = to_numpy((output[0] if isinstance(output, tuple) else output)[0])

        return hook

    handles = []
    try:
        for layer in layers:
            for module, attribute in ((layer.block, "x"), (layer.attention, "z"), (layer.projection, "w")):
                handles.append(module.register_forward_pre_hook(before(layer, attribute), with_kwargs=True))
            handles.append(layer.block.register_forward_hook(after(layer)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_sequence(base: nn.Module, layers: list[Layer], input_ids: torch.Tensor) -> Array:
    """One forward pass of [1, T] ids; fills the layers' traces and returns the last hidden state [T, D]."""
    by_module = {layer.attention: layer for layer in layers}
    for layer in layers:
        layer.trace = Trace()

    def keep(module: nn.Module, call: AttentionCall) -> None:
        by_module[module].trace.call = call

    with torch.no_grad(), attention_replaced(keep), residual_hooks(layers):
        hidden = base(input_ids=input_ids, use_cache=False).last_hidden_state
    return to_numpy(hidden[0])


# ---------------------------------------------------------------------------------------------------------
# Small mathematics


def mean(values: Any) -> float:
    """Mean of a list or array; NaN where it is empty."""
    values = np.asarray(values, dtype=np.float64).ravel()
    return float(values.sum() / len(values)) if len(values) else float("nan")


def norms(rows: Array) -> Array:
    """The norm of every row."""
    return np.sqrt((rows**2).sum(axis=1))


def ratio(a: Any, b: Any) -> Any:
    """a / b, without a warning where b is 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.divide(a, b)


def cosines(a: Array, b: Array) -> Array:
    """cos(a_i, b_j) for all rows i of a and j of b."""
    return ratio(a @ b.T, np.outer(norms(a), norms(b)))


def pairwise_cosine(rows: Array) -> float:
    """Mean cosine over unordered pairs of different rows."""
    table = cosines(rows, rows)
    return mean([table[i, j] for i in range(len(rows)) for j in range(i)])


def row_entropy(row: Array) -> float:
    """-sum p log p in nats, with 0 log 0 = 0."""
    p = row[row > 0]
    return float(-(p * np.log(p)).sum())


def log_sum_exp(values: Array) -> float:
    """log of the sum of exponentials; -inf where there are no values."""
    if len(values) == 0:
        return -np.inf
    top = values.max()
    return float(top + np.log(np.exp(values - top).sum()))


def excess_kurtosis(values: Array) -> float:
    """Fisher kurtosis with population moments: 0 for a normal distribution."""
    centred = values - mean(values)
    return float(ratio(mean(centred**4), mean(centred**2) ** 2) - 3.0)


# ---------------------------------------------------------------------------------------------------------
# Definitions: one head of one sequence


def is_causal(visible: Array) -> bool:
    """No query may see a later key."""
    return not np.triu(visible, 1).any()


def alpha_scores(probs: Array, visible: Array) -> Array:
    """alpha_k for every key k: the mean attention it receives over the queries that may see it; NaN where none may."""
    return np.array([mean(probs[visible[:, k], k]) for k in range(probs.shape[1])])


def sink_score(probs: Array) -> float:
    """Gu et al.'s alpha_0: the mean over every query, which counts with 0 where it may not see key 0."""
    return mean([row[0] for row in probs])


def seeing(visible: Array) -> list[int]:
    """n_k: the number of queries that may see key k."""
    return [int(visible[:, k].sum()) for k in range(visible.shape[1])]


def peak_range(visible: Array) -> list[int]:
    """The keys that at least a quarter as many queries see as the key that most queries see."""
    rows = seeing(visible)
    most = max(rows)
    return [k for k, count in enumerate(rows) if count >= most / 4]


def counted_range(visible: Array) -> list[int]:
    """The keys that at least 16 queries see, and a sixteenth as many as the key that most queries see."""
    rows = seeing(visible)
    most = max(rows)
    return [k for k, count in enumerate(rows) if count >= max(16, most / 16)]


def sinks(
    probs: Array, visible: Array, x: Array, epsilon: float
) -> list[tuple[str, float, int, float, float, float, float]]:
    """Every sink of one layer and sequence, as (kind, head, position, alpha, cos_first, max_abs, norm_ratio).

    `probs` and `visible` are [H, T, T], x is [T, D], entering the layer.
    """
    length = len(x)
    sizes = np.array([np.sqrt((row**2).sum()) for row in x])
    cosine = [float((x[k] * x[0]).sum() / sizes[k] / sizes[0]) for k in range(length)]
    usual, middle = np.median(sizes), np.median(np.abs(x))
    state = [(cosine[k], float(np.abs(x[k]).max()), sizes[k] / usual) for k in range(length)]
    found = []
    for h in range(len(probs)):
        alpha = alpha_scores(probs[h], visible[h])
        for k in counted_range(visible[h]):
            if alpha[k] > epsilon:
                found.append(("attention", float(h), k, alpha[k], *state[k]))
    for k in range(length):
        if abs(state[k][0]) > 0.9 and state[k][2] > 5:
            found.append(("state", np.nan, k, np.nan, *state[k]))
        if state[k][1] > 100 and state[k][1] > 1000 * middle:
            found.append(("massive", np.nan, k, np.nan, *state[k]))
    return found


def mass_columns(probs: Array, visible: Array, epsilon: float = 0.3) -> dict[str, float]:
    """Every column that needs the attention map alone."""
    length = len(probs)
    later = range(1, length)
    alpha, score = alpha_scores(probs, visible), sink_score(probs)
    tail = min(64, length - 1)
    columns = {
        "bos_mass": mean([probs[i, 0] for i in later]),
        "sink_score": score,
        "sink_rate": float(score > epsilon),
        "sinks_per_sequence": float(sum(alpha[k] > epsilon for k in peak_range(visible))),
        "first_argmax": mean([float(probs[i, 0] >= probs[i].max()) for i in later]),
        "self_mass": mean([probs[i, i] for i in later]),
        "previous_mass": mean([probs[i, i - 1] for i in later]),
        "entropy": mean([row_entropy(probs[i]) for i in range(length)]),
        "uniformity": mean([row_entropy(probs[i]) / np.log(visible[i].sum()) for i in later if visible[i].sum() > 1]),
        "learned_sink_mass": mean([1.0 - probs[i].sum() for i in range(length)]),
        "tail_mass": mean([probs[i, 0] for i in range(length - tail, length)]),
        "first_visible": mean([float(visible[i, 0]) for i in later]),
        "awft": score,
        "first4_mass": mean([probs[i, :4].sum() for i in range(length)]),
    }
    columns["first4_boost"] = columns["first4_mass"] / mean(
        [visible[i, :4].sum() / visible[i].sum() for i in range(length)]
    )
    elsewhere = [alpha[k] > epsilon for k in counted_range(visible) if k >= 1]
    columns["sink_elsewhere"] = float(any(elsewhere)) if elsewhere else np.nan
    columns["aeqd"] = columns["entropy"]
    if length >= 64:
        columns["sink_score_t64"] = early = sink_score(probs[:64])
        columns["sink_rate_t64"] = float(early > epsilon)
    return columns


def alpha_scores_t64(probs: Array, visible: Array) -> Array:
    """alpha_k of the first 64 keys over the first 64 queries only."""
    return alpha_scores(probs[:64, :64], visible[:64, :64])


def sink_margin(logits: Array, visible: Array, sink_logit: float | None = None) -> float:
    """Mean over queries i >= 1 that see key 0: s_i0 minus the log-sum-exp of other visible logits and the sink's."""
    margins = []
    for i in range(1, len(logits)):
        if not visible[i, 0]:
            continue
        others = logits[i, 1:][visible[i, 1:]]
        if sink_logit is not None:
            others = np.append(others, sink_logit)
        margins.append(logits[i, 0] - log_sum_exp(others))
    return mean(margins)


def geometry_columns(query: Array, key: Array, logits: Array, causal: bool) -> dict[str, float]:
    """Columns of query-key geometry, which ignore any sliding window."""
    length = len(query)
    later = range(1, length)
    cos = cosines(query, key)
    return {
        "qk_cos_first": mean([cos[i, 0] for i in later]),
        "qk_cos_other": mean([cos[i, j] for i in later for j in later if j <= i or not causal]),
        "q_norm": mean(norms(query)),
        "k_norm_first": float(norms(key)[0]),
        "k_norm_other": mean(norms(key)[1:]),
        "logit_gap": mean([logits[i, 0] - mean(logits[i, : i + 1] if causal else logits[i]) for i in later]),
    }


def logit_size(logits: Array, causal: bool) -> float:
    """Size of the two means whose difference is logit_gap; it bounds the rounding error of even a small gap, and of a
    small sink_margin, whose second term is the log of a sum in place of a mean."""
    first = [logits[i, 0] for i in range(1, len(logits))]
    every = [mean(logits[i, : i + 1] if causal else logits[i]) for i in range(1, len(logits))]
    return mean(np.abs(first)) + mean(np.abs(every))


def value_columns(value: Array, output: Array, w: Array, w_o: Array) -> dict[str, float]:
    """Columns of values and outputs; `w_o` [D, dv] is the head's slice of the output projection."""
    value_norms, written_values = norms(value), norms(value @ w_o.T)
    return {
        "ftvvn": float(value_norms[0]),
        "avvn": mean(value_norms),
        "lthon": float(norms(w)[-1]),
        "lthon_hn": float(ratio(norms(w)[-1], mean(norms(w)))),
        "ahon": mean(norms(w)),
        "residual_write": mean(norms(w @ w_o.T)),
        "value_drain": float(ratio(value_norms[0], mean(value_norms[1:]))),
        "ov_drain": float(ratio(written_values[0], mean(written_values[1:]))),
        "gate_open": float(ratio(mean(norms(output)), mean(value_norms[1:]))),
    }


def head_columns(call: AttentionCall, w: Array, w_o: Array, h: int, epsilon: float) -> dict[str, float]:
    """All columns of query head `h` that need no other head; `w` [T, H * dv], `w_o` [D, H * dv]."""
    group = h // (len(call.query) // len(call.key))
    width = w.shape[1] // len(call.query)
    own = slice(h * width, (h + 1) * width)
    sink = None if call.sink_logits is None else float(call.sink_logits[h])
    causal = is_causal(call.visible[h])
    return {
        **mass_columns(call.probs[h], call.visible[h], epsilon),
        "sink_margin": sink_margin(call.logits[h], call.visible[h], sink),
        **geometry_columns(call.query[h], call.key[group], call.logits[h], causal),
        **value_columns(call.value[group], call.output[h], w[:, own], w_o[:, own]),
    }


def add_layer_normalised(heads: dict[str, Array]) -> None:
    """Add the columns divided by the mean over the heads of the same layer and sequence."""

    def over_layer_mean(numerator: str, denominator: str) -> Array:
        return ratio(heads[numerator], heads[denominator].mean(axis=2, keepdims=True))

    for name in ("awft", "aeqd", "ftvvn", "avvn", "residual_write"):
        heads[f"{name}_ln"] = over_layer_mean(name, name)
    heads["lthon_ln"] = over_layer_mean("lthon", "ahon")
    heads["honor"] = over_layer_mean("ahon", "ahon")


# ---------------------------------------------------------------------------------------------------------
# Definitions: one layer


def layer_columns(x: Array, z: Array, e: Array) -> dict[str, float]:
    """The columns of one layer of one sequence; x, z, e are [T, D]."""
    size = np.abs(x)
    top_token = int(np.argmax(size.max(axis=1)))
    top = float(size.max())
    median = float(np.median(size))
    squared = np.linalg.svd(x, compute_uv=False) ** 2
    return {
        "cos_first_residual": mean(cosines(x[:1], x[1:])),
        "cos_first_input": mean(cosines(z[:1], z[1:])),
        "avg_cos_residual": pairwise_cosine(x[1:]),
        "avg_cos_input": pairwise_cosine(z[1:]),
        "avg_cos_output": pairwise_cosine(e[1:]),
        "norm_first": float(norms(x)[0]),
        "norm_other": mean(norms(x)[1:]),
        "norm_ratio": float(ratio(norms(x)[0], mean(norms(x)[1:]))),
        "inf_norm": top,
        "max_over_token_median": float(ratio(top, np.median(size[top_token]))),
        "max_over_layer_median": float(ratio(top, median)),
        "massive_tokens": float(sum(((row > 100) & (row > 1000 * median)).any() for row in size)),
        "kurtosis_first": excess_kurtosis(x[0]),
        "kurtosis_other": mean([excess_kurtosis(row) for row in x[1:]]),
        "matrix_entropy": row_entropy(ratio(squared, squared.sum())),
    }


def run_layer_columns(x: Array) -> dict[str, float]:
    """The columns of one layer over all sequences; x is [N, T, D]. Ties: first sequence, token, dimension."""
    _, token, dim = np.unravel_index(int(np.argmax(np.abs(x))), x.shape)
    return {
        "max_abs": float(np.abs(x).max()),
        "max_abs_token": int(token),
        "max_abs_dim": int(dim),
        "first_constancy": pairwise_cosine(x[:, 0]),
    }


# ---------------------------------------------------------------------------------------------------------
# The whole measurement


def measure(model: PreTrainedModel, input_ids: torch.Tensor, epsilon: float = 0.3) -> Reference:
    """Measure a float32 CPU model on [N, T] token ids without padding, one sequence at a time."""
    base = model.base_model
    if base.training:
        raise ValueError("the model must be in eval mode")
    count, length = input_ids.shape
    layers = find_layers(base, input_ids[:1])
    depth = len(layers)

    heads: dict[str, Array] = {}
    logit_sizes: list[list[list[float]]] = []
    layer_table: dict[str, Array] = defaultdict(lambda: np.full((count, depth), np.nan))
    alpha: list[list[list[Array]]] = []
    alpha_t64: list[list[list[Array]]] = []
    attentions: list[list[Array]] = [[] for _ in layers]
    inputs: list[list[Array]] = [[] for _ in layers]
    hidden = []
    found: list[tuple[Any, ...]] = []
    causal, keys_that_count = [True] * depth, [[[]]] * depth
    for n in range(count):
        hidden.append(run_sequence(base, layers, input_ids[n : n + 1]))
        alpha.append([])
        alpha_t64.append([])
        logit_sizes.append([])
        for index, layer in enumerate(layers):
            trace = layer.trace
            w_o = projection_matrix(layer.projection)
            width = len(trace.call.query)
            for h in range(width):
                for name, value in head_columns(trace.call, trace.w, w_o, h, epsilon).items():
                    heads.setdefault(name, np.full((count, depth, width), np.nan))[n, index, h] = value
            for name, value in layer_columns(trace.x, trace.z, trace.e).items():
                layer_table[name][n, index] = value
            probs, visible = trace.call.probs, trace.call.visible
            causal[index] = is_causal(visible[0])
            keys_that_count[index] = [peak_range(seen) for seen in visible]
            logit_sizes[n].append([logit_size(trace.call.logits[h], causal[index]) for h in range(width)])
            alpha[n].append([alpha_scores(probs[h], visible[h]) for h in range(width)])
            alpha_t64[n].append([alpha_scores_t64(probs[h], visible[h]) for h in range(width)])
            found += [(n, index, *each) for each in sinks(probs, visible, trace.x, epsilon)]
            attentions[index].append(probs)
            inputs[index].append(trace.x)
    add_layer_normalised(heads)

    run_rows = [run_layer_columns(np.stack(rows)) for rows in inputs]
    all_alpha = np.array(alpha)
    mean_alpha = all_alpha.mean(axis=0)  # [L, H, T]
    peak_position = np.zeros(mean_alpha.shape[:2], dtype=int)
    peak_score = np.zeros(mean_alpha.shape[:2])
    for index in range(depth):
        for h in range(mean_alpha.shape[1]):
            best = max(keys_that_count[index][h], key=lambda k, row=mean_alpha[index, h]: row[k])
            peak_position[index, h], peak_score[index, h] = best, mean_alpha[index, h, best]
    return Reference(
        heads=heads,
        sizes=dict.fromkeys(("logit_gap", "sink_margin"), np.array(logit_sizes)),
        layers=dict(layer_table),
        run_layers={name: np.array([row[name] for row in run_rows]) for name in run_rows[0]},
        alpha=all_alpha,
        alpha_t64=np.array(alpha_t64) if length >= 64 else None,
        peak_position=peak_position,
        peak_score=peak_score,
        attentions=[np.stack(maps) for maps in attentions],
        hidden=np.stack(hidden),
        sinks=found,
    )
