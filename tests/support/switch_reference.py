"""A naive reference for `--measure switch`: float64 numpy, from whole attention maps and whole output projections."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import torch
from reference import (
    Array,
    AttentionCall,
    alpha_scores,
    find_layers,
    peak_range,
    projection_matrix,
    run_sequence,
)


def norms(rows: Array) -> Array:
    return np.sqrt((rows**2).sum(-1))


def head_columns(call: AttentionCall, h: int, slice_o: Array, z: Array) -> dict[str, float]:
    """All columns of switch.csv for one head of one sequence. slice_o: W_O^h, [D, dv]."""
    probs, values = call.probs[h], call.value[h // (len(call.probs) // len(call.value))]
    written, each = (call.output[h] @ slice_o.T)[1:], values @ slice_o.T
    size = norms(each)[1:].mean()
    opened = norms(written) / size
    off, sunk = opened < 0.1, probs[1:, 0] >= 0.9
    energy = (written**2).sum()
    sink = probs[1:, :1] * each[:1]
    own = np.diag(probs)[1:, None] * each[1:]
    rest = np.array([sum(probs[i, j] * each[j] for j in range(1, len(probs)) if j != i) for i in range(1, len(probs))])
    advantage = []
    for i in range(1, len(probs)):
        others = [call.logits[h, i, j] for j in range(1, len(probs)) if call.visible[h, i, j]]
        taken = [] if call.sink_logits is None else [call.sink_logits[h]]
        if call.visible[h, i, 0] and others:
            advantage.append(call.logits[h, i, 0] - np.log(np.exp([*others, *taken]).sum() / len(others)))
    varied = 0 < off.sum() < len(off) and 0 < sunk.sum() < len(sunk)
    found = {"off_rate": off.mean(), "sink_rows": sunk.mean()}
    elsewhere = np.array([probs[i].sum() - probs[i, 0] - probs[i, i] for i in range(1, len(probs))])
    found["self_rows"] = np.mean([probs[i, i] >= 0.9 for i in range(1, len(probs))])
    found["copy_rows"] = ((probs[1:, 0] < 0.1) & (elsewhere >= 0.5)).mean()
    found |= {f"open_q{n}": float(np.quantile(opened, n / 100)) for n in (10, 50, 90)}
    found |= {"off_not_sunk": (off & ~sunk).mean(), "sunk_not_off": (sunk & ~off).mean()}
    found["switch_phi"] = float(np.corrcoef(off, sunk)[0, 1]) if varied else np.nan
    found |= {"from_sink": (sink**2).sum() / energy, "from_self": (own**2).sum() / energy}
    found["communication"] = (rest**2).sum() / energy
    found["constant_share"] = (written.mean(0) ** 2).sum() / (norms(written) ** 2).mean()
    aligned = [z[0] @ row / np.sqrt((z[0] @ z[0]) * (row @ row)) for row in z[1:]]
    found["alignment_openness"] = float(np.corrcoef(aligned, opened)[0, 1])
    found["key_bias"] = float(np.std(advantage)) if len(advantage) > 1 else np.nan
    return found


def layer_columns(x: Array, z: Array, w: Array, slices: Array, call: AttentionCall) -> dict[str, float]:
    """All columns of layers.csv for one sequence. w [T, H, dv]; slices [D, H, dv]."""
    each = np.einsum("thv,dhv->htd", w, slices)[:, 1:]
    total = norms(each).sum(0).mean()
    found = {
        "compensation": norms(each.sum(0)).mean() / total,
        "compensation_unrelated": np.sqrt((norms(each) ** 2).sum(0)).mean() / total,
    }
    alpha = np.mean([alpha_scores(*head) for head in zip(call.probs, call.visible, strict=True)], 0)
    eligible = set.intersection(*(set(peak_range(visible)) for visible in call.visible))
    peak = max(sorted(eligible), key=lambda k: alpha[k])
    for name, tokens in (("residual", x), ("input", z)):
        cosines = np.array([tokens[0] @ row / np.sqrt((tokens[0] @ tokens[0]) * (row @ row)) for row in tokens[1:]])
        found[f"cos_first_{name}_min"] = cosines.min()
        found[f"cos_first_{name}_q05"] = float(np.quantile(cosines, 0.05))
        found[f"cos_first_{name}_std"] = float(np.std(cosines))
        found[f"cos_first_{name}_positive"] = (cosines > 0).mean()
        others = [row for j, row in enumerate(tokens) if j != peak]
        from_peak = [tokens[peak] @ row / np.sqrt((tokens[peak] @ tokens[peak]) * (row @ row)) for row in others]
        found[f"cos_peak_{name}"] = float(np.mean(from_peak))
    found["alignment_margin"] = largest_margin(z, 0)
    found["alignment_margin_other"] = largest_margin(z, len(z) // 2)
    return found


def largest_margin(z: Array, token: int) -> float:
    """Frank and Wolfe's search for the shortest mean of the matrices z_j (z_k - z_i)^T, i and j != k: the dual of the
    largest margin, in d^2 unknowns, without their being products of two distances."""
    rest = np.delete(z, token, axis=0)
    size = (rest**2).sum(1).mean()
    gaps = z[token] - rest
    kernel = np.kron(rest @ rest.T, gaps @ gaps.T) / size**2
    weights = np.full(len(kernel), 1 / len(kernel))
    solution = nonnegative(kernel, weights)
    return float(np.sqrt(max(solution @ kernel @ solution, 0.0)))


def nonnegative(kernel: Array, weights: Array) -> Array:
    """The weights >= 0 of sum 1 with the least a^T K a, by steps away from the worst active corner to the best one."""
    image = kernel @ weights
    for _ in range(20000):
        best = int(image.argmin())
        worst = int(np.where(weights > 0, image, -np.inf).argmax())
        gap = image[worst] - image[best]
        if gap < 1e-13:
            break
        curve = kernel[best, best] - 2 * kernel[best, worst] + kernel[worst, worst]
        step = min(weights[worst], gap / curve if curve > 0 else np.inf)
        weights[best] += step
        weights[worst] -= step
        image += step * (kernel[:, best] - kernel[:, worst])
    return weights


def measure_switch(model: Any, ids: torch.Tensor) -> tuple[dict[str, Array], dict[str, Array], dict[str, Array]]:
    """(columns by head [N, L, H], columns by layer [N, L], cosines with the first token [N, L, T])."""
    layers = find_layers(model, ids[:1])
    heads: dict[str, list[Any]] = defaultdict(list)
    whole: dict[str, list[Any]] = defaultdict(list)
    cosines: dict[str, list[Any]] = {"cos_residual": [], "cos_input": []}
    for row in ids:
        run_sequence(model, layers, row[None])
        of_heads, of_layers = [], []
        for layer in layers:
            trace, count = layer.trace, len(layer.trace.call.query)
            slices = projection_matrix(layer.projection)
            slices = slices.reshape(len(slices), count, -1)
            of_heads.append([head_columns(trace.call, h, slices[:, h], trace.z) for h in range(count)])
            w = trace.w.reshape(len(trace.w), count, -1)
            of_layers.append(layer_columns(trace.x, trace.z, w, slices, trace.call))
        for name in of_heads[0][0]:
            heads[name].append([[head[name] for head in layer] for layer in of_heads])
        for name in of_layers[0]:
            whole[name].append([layer[name] for layer in of_layers])
        for name, part in (("cos_residual", "x"), ("cos_input", "z")):
            tokens = [getattr(layer.trace, part) for layer in layers]
            cosines[name].append([each @ each[0] / norms(each) / norms(each[0]) for each in tokens])
    return tuple({name: np.array(v) for name, v in part.items()} for part in (heads, whole, cosines))  # type: ignore[return-value]
