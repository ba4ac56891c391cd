"""Compares runs with the float64 reference, and arrays with each other."""

from __future__ import annotations

import numpy as np
from reference import Reference

import sinkscope
from sinkscope.metrics import METRICS
from sinkscope.tables.columns import RUN_COLUMNS

RELATIVE, ABSOLUTE = 1e-5, 1e-6


def table(run: sinkscope.Run, names: list[str], heads: bool) -> dict[str, np.ndarray]:
    """Per-sequence values of a run as [sequence, layer, head] (or [sequence, layer]) arrays."""
    rows = run.sequences[run.sequences["head"].notna() == heads]
    keys = ["sequence", "layer", *(["head"] if heads else [])]
    rows = rows.sort_values(keys)
    shape = tuple(rows[key].nunique() for key in keys)
    return {name: rows[name].to_numpy(dtype=float).reshape(shape) for name in names}


def assert_close(
    ours: np.ndarray, reference: np.ndarray, name: str, relative: float, absolute: float | np.ndarray
) -> None:
    """Asserts that each number is within `relative` or `absolute` of the reference, and NaN where that is NaN."""
    both_missing = np.isnan(ours) & np.isnan(reference)
    error = np.abs(ours - reference)
    wrong = ~both_missing & ~(error <= np.maximum(relative * np.abs(reference), absolute))
    assert not wrong.any(), (
        f"{name}: {ours[wrong][0]} for {reference[wrong][0]} at {np.argwhere(wrong)[0]}, {wrong.sum()} wrong"
    )


def compare(run: sinkscope.Run, reference: Reference, relative: float, absolute: float) -> None:
    """Asserts that all columns agree, per sequence and for the run, and that the reference has every column of the run.

    For a column that is a difference, `absolute` is scaled by the size of what is subtracted where that is above 1.
    """
    bounds = {name: absolute * np.maximum(1, size) for name, size in reference.sizes.items()}
    head_names = list(METRICS["heads"])
    layer_names = [name for name, each in METRICS["layers"].items() if each.shown and each.measure is None]
    assert set(head_names) - set(reference.heads) <= {"sink_score_t64", "sink_rate_t64"}
    assert set(layer_names) == set(reference.layers)
    ours = table(run, head_names, heads=True)
    for name, values in reference.heads.items():
        assert_close(ours[name], values, name, relative, bounds.get(name, absolute))
    ours = table(run, layer_names, heads=False)
    for name, values in reference.layers.items():
        assert_close(ours[name], values, name, relative, absolute)
    layers, heads = run.layers, run.heads
    assert set(RUN_COLUMNS["layers"]) - set(reference.run_layers) == {"sink_heads", "dormant_heads"}
    for name, values in reference.run_layers.items():
        assert_close(layers[name].to_numpy(dtype=float, na_value=np.nan), values, name, relative, absolute)
    for name, values in reference.heads.items():
        bound = bounds[name].mean(0).ravel() if name in bounds else absolute
        assert_close(heads[name].to_numpy(), values.mean(0).ravel(), f"mean {name}", relative, bound)
        expected = (
            values.std(0, ddof=1).ravel() / np.sqrt(len(values)) if len(values) > 1 else np.full(len(heads), np.nan)
        )
        assert_close(heads[f"{name}_sem"].to_numpy(), expected, f"{name}_sem", 10 * relative, 10 * bound)
    assert (heads["peak_position"] == reference.peak_position.ravel()).all()
    assert_close(heads["peak_score"].to_numpy(), reference.peak_score.ravel(), "peak_score", relative, absolute)
    alpha = run.positions["alpha"].to_numpy().reshape(reference.alpha.shape[1:])
    assert_close(alpha, reference.alpha.mean(0), "alpha", relative, absolute)
    if reference.alpha_t64 is not None:
        early = run.positions["alpha_t64"].to_numpy().reshape(alpha.shape)
        assert_close(early[..., :64], reference.alpha_t64.mean(0), "alpha_t64", relative, absolute)
        assert np.isnan(early[..., 64:]).all()
