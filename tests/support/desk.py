"""Runs for the tests of compare, check, export, plot and report: tiny models scanned, and large runs made by hand."""

from __future__ import annotations

import copy
from functools import cache

import numpy as np
import pandas as pd
import torch
from models import random_ids, tiny

import sinkscope
from sinkscope.runs.run import Run
from sinkscope.runs.schema.manifest import FirstToken

LENGTH, SEQUENCES = 48, 8


@cache
def _scanned(family: str, text: int, layers: int, plant: str, dtype: str) -> Run:
    model = tiny(family, num_hidden_layers=layers)
    with torch.no_grad():
        attention = model.layers[1].self_attn
        size = attention.head_dim
        if plant == "zero head":
            attention.o_proj.weight[:, :size] = 0
        if plant == "noise":
            weight = attention.q_proj.weight
            weight += 0.02 * weight.std() * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
    ids = random_ids(SEQUENCES, LENGTH, seed=text)
    ids[:, 0] = 5 + text if plant == "no bos" else 1
    run = sinkscope.scan(model.to(getattr(torch, dtype)), data=ids, self_check=False)
    run.manifest.model.id = "tiny"
    return run


def scanned(plant: str = "", text: int = 0, layers: int = 3, dtype: str = "float32", family: str = "llama") -> Run:
    """A tiny model scanned over random tokens after a fixed first one; a fresh copy, so that tests may change it."""
    return copy.deepcopy(_scanned(family, text, layers, plant, dtype))


def enlarged(run: Run, layers: int, heads: int, sequences: int = 8) -> Run:
    """The run's first layer and head many times over, with noise: a run of any size in no time."""
    generator = np.random.default_rng(0)
    big = copy.deepcopy(run)

    def spread(table: pd.DataFrame, with_head: bool) -> pd.DataFrame:
        own = table[table["layer"] == 0]
        rows = own[own["head"] == 0] if with_head else own
        count = layers * (heads if with_head else 1)
        made = pd.concat([rows] * count, ignore_index=True)
        made["layer"] = np.repeat(np.arange(layers), len(made) // layers)
        if with_head:
            made["head"] = np.tile(np.repeat(np.arange(heads), len(rows)), layers)
        for name in made.select_dtypes("float"):
            made[name] *= 1 + 0.1 * generator.standard_normal(len(made))
        return made

    big.heads, big.layers = spread(run.heads, True), spread(run.layers, False)
    big.positions, big.length_curve = spread(run.positions, True), spread(run.length_curve, True)
    table = run.sequences[run.sequences["sequence"] < sequences]
    is_head = table["head"].notna()
    parts = [spread(table[is_head], True), spread(table[~is_head].drop(columns="head"), False)]
    big.sequences = pd.concat(parts, ignore_index=True).sort_values("sequence", kind="stable", ignore_index=True)
    big.sequences["head"] = big.sequences["head"].astype("Int64")
    big.measured = {
        name: spread(table, "head" in table) if "layer" in table else table for name, table in run.measured.items()
    }
    return big


def hostile(run: Run, text: str) -> Run:
    """The run with `text` wherever a name, token or path comes from outside."""
    evil = copy.deepcopy(run)
    evil.manifest.model.id = text
    for data in evil.manifest.data:
        data.domain = text
    evil.sequences["domain"] = text
    evil.summary.first_token = FirstToken(id=1, text=text, distinct=1, is_bos=True)
    evil.summary.warnings = [text]
    evil.summary.streams["text"].in_words = [text, text]
    return evil


@cache
def smoothed(seed: int = 0) -> Run:
    """A tiny model scanned with every table that a figure shows; those of `switch` are made by hand."""
    model = tiny("llama", num_hidden_layers=2)
    run = sinkscope.scan(model, data=random_ids(3, 24, seed=seed), measure=["smoothing"], self_check=False)
    run.manifest.model.id = "tiny"
    for number, name in enumerate(("cost_sink_lower_qk", "cost_diagonal_lower_qk", "cost_sink_upper_qk")):
        run.measured["smoothing"][name] = 10.0**number  # no head of so small a model has a margin above 0
    places = run.heads[["stream", "layer", "head", "module"]]
    share = np.linspace(0, 1, len(places))
    run.measured.setdefault(
        "switch", places.assign(sink_rows=share, off_rate=share**2, communication=0.2 * share, from_sink=0.1)
    )
    rows = run.layers[["stream", "layer", "module"]].merge(pd.DataFrame({"position": range(24)}), how="cross")
    cosines = np.cos(rows["position"] / 24 + rows["layer"])
    run.measured.setdefault("alignment", rows.assign(cos_residual=cosines, cos_input=-cosines))
    return run
