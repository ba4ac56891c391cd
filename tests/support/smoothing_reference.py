"""A naive reference for the smoothing table: float64 numpy, W formed whole from weights that are found by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from reference import Array, AttentionCall, find_layers, projection_matrix, run_sequence, to_numpy


def weights(family: str, layer: Any, heads: int, groups: int) -> dict[str, Array]:
    """W_Q, W_K, W_V as [head or group, d, D], without biases, and the gain [D] of the block's input norm."""
    attention, block = layer.attention, layer.block
    if family == "gpt2":
        whole = projection_matrix(attention.c_attn)  # [3 D, D], queries, keys, values one after the other
        q, k, v = (part.reshape(heads, -1, part.shape[1]) for part in np.split(whole, 3))
        return {"q": q, "k": k, "v": v, "gain": to_numpy(block.ln_1.weight)}
    if family == "gpt_neox":
        whole = to_numpy(attention.query_key_value.weight)
        parts = whole.reshape(heads, 3, -1, whole.shape[1])  # each head's q, k, v side by side
        return {"q": parts[:, 0], "k": parts[:, 1], "v": parts[:, 2], "gain": to_numpy(block.input_layernorm.weight)}
    q = to_numpy(attention.q_proj.weight).reshape(heads, -1, attention.q_proj.in_features)
    k = to_numpy(attention.k_proj.weight).reshape(groups, -1, attention.q_proj.in_features)
    v = to_numpy(attention.v_proj.weight).reshape(groups, -1, attention.q_proj.in_features)
    one = 1.0 if family in ("gemma2", "gemma3") else 0.0  # Gemma's norms multiply by 1 + w
    if family in ("qwen3", "gemma3"):
        q = q * (one + to_numpy(attention.q_norm.weight))[:, None]
        k = k * (one + to_numpy(attention.k_norm.weight))[:, None]
    gain = one + to_numpy(block.input_layernorm.weight)
    return {"q": q, "k": k, "v": v, "gain": gain}


def normalised(family: str, layer: Any, x: Array) -> Array:
    """The block's input norm without its gain and offset."""
    norm = layer.block.ln_1 if family == "gpt2" else layer.block.input_layernorm
    epsilon = next(getattr(norm, name) for name in ("eps", "variance_epsilon") if hasattr(norm, name))
    if family in ("gpt2", "gpt_neox"):
        x = x - x.mean(axis=1, keepdims=True)
    return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + epsilon)


def average_cosine(rows: Array) -> float:
    """Mean cosine of all pairs of rows, in a double loop."""
    total, pairs = 0.0, 0
    for i in range(len(rows)):
        for j in range(i):
            total += rows[i] @ rows[j] / np.sqrt((rows[i] @ rows[i]) * (rows[j] @ rows[j]))
            pairs += 1
    return total / pairs


def stable_rank(matrix: Array) -> float:
    values = np.linalg.svd(matrix, compute_uv=False)
    return float((values**2).sum() / values[0] ** 2)


def head_columns(
    x: Array, z: Array, w: Array, call: AttentionCall, h: int, whole: Array, slice_o: Array, scale: float
) -> dict[str, float]:
    """All per-sequence columns of one head. x, z [T, D]; w [T, dv] read by slice_o [D, dv]; whole = W [D, D]."""
    count, probs = len(x) - 1, call.probs[h]
    xs, zs = x[1:], z[1:]
    m = zs.mean(axis=0)
    covariance = sum(np.outer(row - m, row - m) for row in zs) / count
    beta = sum((a - xs.mean(axis=0)) @ (b - m) for a, b in zip(xs, zs, strict=True)) / count / np.trace(covariance)
    tr_bw, tr_bwtw = np.trace(covariance @ whole), np.trace(covariance @ whole.T @ whole)
    mixes = {
        "identity": zs,
        "attention": (probs @ z)[1:],
        "uniform": np.array([z[: i + 1].mean(axis=0) for i in range(1, len(z))]),
    }
    found = {f"avgcos_{name}": average_cosine(xs + mix @ whole.T) for name, mix in mixes.items()}
    found |= path(xs, zs, mixes["uniform"], whole)
    found |= {"beta": beta, "tr_bw": tr_bw, "tr_bwtw": tr_bwtw, "beta_tr_bw": beta * tr_bw}
    found["avgcos_residual"] = average_cosine(xs)
    change = found["avgcos_attention"] - found["avgcos_identity"]
    found["attention_minus_identity"] = change
    found["uniform_minus_attention"] = found["avgcos_uniform"] - found["avgcos_attention"]
    found["relative_change"] = change / abs(found["avgcos_identity"])
    mean_x = xs.mean(axis=0)
    found["theory_residual"] = mean_x @ mean_x / (mean_x @ mean_x + np.trace(np.cov(xs.T, bias=True)))
    through = beta * np.eye(len(m)) + whole
    signal = through @ m
    found["theory_identity"] = signal @ signal / (signal @ signal + np.trace(through @ covariance @ through.T))
    found["rank_output"] = stable_rank(w[1:] @ slice_o.T)
    pairs = []
    for i in range(1, len(x)):
        others = [call.logits[h, i, j] for j in range(1, len(x)) if call.visible[h, i, j]]
        if call.visible[h, i, 0] and others:
            pairs.append(call.logits[h, i, 0] - max(others))
    found["sink_margin_pairs"] = float(np.mean(pairs)) if pairs else np.nan
    found |= costs(probs, zs, m, covariance, scale)
    found |= costs_of_groups(found["sink_margin_pairs"], zs, m, scale)
    return found | costs_in_parts(found["sink_margin_pairs"], zs, m, scale)


def path(xs: Array, zs: Array, uniform: Array, whole: Array) -> dict[str, float]:
    """The walk from each token's own value to uniform attention, whose spread is a quadratic function of lam."""

    def walked(lam: float) -> Array:
        return xs + ((1 - lam) * zs + lam * uniform) @ whole.T

    def spread(lam: float) -> float:
        rows = walked(lam)
        return float(np.mean([(row - rows.mean(axis=0)) @ (row - rows.mean(axis=0)) for row in rows]))

    slopes = [(spread(lam + 0.5) - spread(lam - 0.5)) / spread(0.0) for lam in (0.0, 1.0)]
    half = average_cosine(walked(0.5))
    return {"path_slope_own": slopes[0], "path_slope_dense": slopes[1], "avgcos_half": half}


def groups_of(zs: Array) -> list[list[int]]:
    """Tokens that a chain of pairs of cosine above 1/2 joins, found by merging lists."""
    groups = [[i] for i in range(len(zs))]
    for i in range(len(zs)):
        for j in range(i):
            if zs[i] @ zs[j] / np.sqrt((zs[i] @ zs[i]) * (zs[j] @ zs[j])) > 0.5:
                one, other = (next(group for group in groups if each in group) for each in (i, j))
                if one is not other:
                    groups.remove(other)
                    one += other
    return groups


def costs_of_groups(kappa: float, zs: Array, m: Array, s: float) -> dict[str, float]:
    groups, width = groups_of(zs), zs.shape[1]
    inside = np.concatenate([zs[group] - zs[group].mean(axis=0) for group in groups])
    bound = max(zs.shape) * 2.0**-23 * np.linalg.svd(zs - m, compute_uv=False)[0]
    span = int((np.linalg.svd(inside, compute_uv=False) > bound).sum())
    pairs = [(zs[i], zs[j]) for group in groups for i in group for j in group if i != j]
    tops = [np.linalg.svd(zs - m, compute_uv=False)[0] ** 2 / (len(zs) - 1)]
    if span:
        within = sum(np.outer(a - b, a - b) for a, b in pairs) / (2 * len(pairs))
        tops.append(np.linalg.eigvalsh(within)[-1])
    kappa = kappa if kappa > 0 else np.nan
    return {
        "token_groups": len(groups),
        "group_span": span,
        "cost_sink_upper_groups": 12 * kappa * len(groups) / (s * width),
        "cost_diagonal_lower_groups": 2 * kappa / (s * min(tops)),
    }


def costs_in_parts(kappa: float, zs: Array, m: Array, s: float) -> dict[str, float]:
    kappa = kappa if kappa > 0 else np.nan
    count, width = zs.shape
    singular = np.linalg.svd(zs - m, compute_uv=False)
    span = int((singular > max(zs.shape) * 2.0**-23 * singular[0]).sum())
    gap = min((a - m) @ (a - b) for i, a in enumerate(zs) for j, b in enumerate(zs) if i != j)
    top = singular[0] ** 2 / (count - 1)
    there = 0 * kappa
    return {
        "token_span": span,
        "cost_sink_lower_qk": kappa / (2 * s * width),
        "cost_sink_upper_qk": 12 * kappa / (s * width),
        "cost_sink_upper_value": 5 * (span + 1) + there,
        "cost_diagonal_lower_qk": 2 * kappa / (s * top),
        "cost_diagonal_lower_paper": kappa / (s * top) + kappa / (2 * s * width),
        "cost_diagonal_upper_qk": 13 * kappa / (s * width) + 4 * kappa * span / (s * (gap if gap > 0 else np.nan)),
        "cost_diagonal_upper_value": 3 * (span + 1) + there,
    }


def costs(probs: Array, zs: Array, m: Array, covariance: Array, s: float) -> dict[str, float]:
    kappa = np.mean([np.log(row[0]) - np.log(row[1:].sum()) for row in probs[1:] if row[0] > 0])
    kappa = kappa if kappa > 0 else np.nan
    width, rank = len(m), np.trace(covariance) / np.linalg.eigvalsh(covariance)[-1]
    gaps = [(a - m) @ (a - b) for i, a in enumerate(zs) for j, b in enumerate(zs) if i != j]
    return {
        "cost_sink_lower": kappa / (2 * s * width),
        "cost_sink_upper": 12 * kappa / (s * width) + 5 * (rank + 1),
        "cost_diagonal_lower": kappa / (s * np.linalg.eigvalsh(np.cov(zs.T))[-1]),
        "cost_diagonal_upper": 13 * kappa / (s * width) + 4 * kappa * rank / (s * np.mean(gaps)) + 3 * (rank + 1),
    }


def measure_smoothing(
    family: str, model: Any, ids: torch.Tensor, only: tuple[int, ...] | None = None
) -> tuple[dict[str, Array], dict[str, Array]]:
    """(per-sequence columns [N, L, H], weights' ranks [L, H]) of all layers, or of those in `only`."""
    layers = find_layers(model, ids[:1])
    sequences: list[list[list[dict[str, float]]]] = []
    ranks: dict[str, list[list[float]]] = {}
    for row in ids:
        run_sequence(model, layers, row[None])
        ranks = {"rank_w": [], "rank_qk": [], "cost_actual": [], "cost_qk": []}
        sequences.append([])
        for layer in [layers[number] for number in only or range(len(layers))]:
            trace = layer.trace
            call = trace.call
            heads, groups = len(call.query), len(call.key)
            matrices = weights(family, layer, heads, groups)
            z = normalised(family, layer, trace.x)
            output = projection_matrix(layer.projection).reshape(len(z[0]), heads, -1)
            found, rank_w, rank_qk, cost_qk = [], [], [], []
            width = call.query.shape[-1]
            scale = getattr(layer.attention, "scaling", width**-0.5)
            normed = any(hasattr(layer.attention, name) for name in ("q_norm", "q_layernorm"))
            for h in range(heads):
                g = h // (heads // groups)
                whole = output[:, h] @ matrices["v"][g] * matrices["gain"]
                w = trace.w.reshape(len(z), heads, -1)[:, h]
                found.append(head_columns(trace.x, z, w, call, h, whole, output[:, h], scale))
                rank_w.append(stable_rank(whole))
                query, key = (matrices[name][at] * matrices["gain"] for name, at in (("q", h), ("k", g)))
                rank_qk.append(stable_rank(query.T @ key))
                cost_qk.append(np.nan if normed else ((query**2).sum() + (key**2).sum()) / 2)
            sequences[-1].append(found)
            ranks["rank_w"].append(rank_w)
            ranks["rank_qk"].append(rank_qk)
            ranks["cost_actual"].append(cost_qk)
            ranks["cost_qk"].append([2 * each for each in cost_qk])
    names = sequences[0][0][0]
    columns = {n: np.array([[[h[n] for h in layer] for layer in layers_] for layers_ in sequences]) for n in names}
    return columns, {name: np.array(rank) for name, rank in ranks.items()}
