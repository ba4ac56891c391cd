"""Measures the gate's false alarms and power on a real checkpoint: new scans must pass, planted changes must fail.

Example: python examples/gate_power.py example:gemma-3-270m --keep power

Scans are kept in the folder and reused, so that another policy can be tried in seconds. The first time takes long: 59
scans of Gemma-3-270M, each with a line on stderr. Prints one row per group.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sinkscope import load_run, scan
from sinkscope.checkpoints import LoadOptions, open_checkpoint
from sinkscope.comparison.baseline import baseline_of
from sinkscope.comparison.gate import check
from sinkscope.comparison.policy import Policy, read_policy

BASE_SEED, SEEDS = 0, 20
NOISE = 0.02


@dataclass
class Scene:
    """One scan: `plant` changes the model for its duration; `options` go to scan."""

    group: str
    name: str
    plant: Callable[[Any], contextlib.AbstractContextManager[None]]
    options: dict[str, Any] = field(default_factory=dict)


@contextlib.contextmanager
def untouched(model: Any) -> Iterator[None]:
    yield


@contextlib.contextmanager
def changed(model: Any, layer: int, name: str, change: Callable[[torch.Tensor], None]) -> Iterator[None]:
    """Applies `change` to one projection's weights in place; restores the weights at the end of the block."""
    weight = getattr(model.layers[layer].self_attn, name).weight
    saved = weight.detach().clone()
    with torch.no_grad():
        change(weight)
    try:
        yield
    finally:
        with torch.no_grad():
            weight.copy_(saved)


def zero_output(layer: int, head: int) -> Any:
    """Zeroes a head: its columns of the output projection."""

    def plant(model: Any) -> Any:
        size = model.config.head_dim
        return changed(model, layer, "o_proj", lambda w: w[:, head * size : (head + 1) * size].zero_())

    return plant


def zero_query(layer: int, head: int) -> Any:
    """Makes a head's attention uniform: zeroes its rows of the query projection."""

    def plant(model: Any) -> Any:
        size = model.config.head_dim
        return changed(model, layer, "q_proj", lambda w: w[head * size : (head + 1) * size].zero_())

    return plant


def noisy_query(layer: int) -> Any:
    """Adds Gaussian noise to one layer's q_proj, with 2 % of the weights' standard deviation."""

    def change(weight: torch.Tensor) -> None:
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(layer), dtype=torch.float32)
        weight.add_(NOISE * weight.float().std() * noise.to(weight))

    return lambda model: changed(model, layer, "q_proj", change)


def scenes(layers: int, heads: int) -> list[Scene]:
    """All scans except the baseline's."""
    same = {"seed": BASE_SEED}
    found = [
        Scene("other dtype, same text", "bfloat16", untouched, same | {"dtype": "bfloat16"}),
        Scene("other batch size, same text", "batch-1", untouched, same | {"batch_size": 1}),
        Scene("other batch size, same text", "batch-16", untouched, same | {"batch_size": 16}),
    ]
    found += [Scene("other texts", f"seed-{n}", untouched, {"seed": n}) for n in range(1, SEEDS + 1)]
    other = {"seed": BASE_SEED + 1}
    for text, options in (("same text", same), ("other texts", other)):
        found.append(Scene(f"BOS dropped, {text}", f"bos-{text[0]}", untouched, options | {"bos": "never"}))
        for layer in range(1, layers, 6):
            place = (layer, layer % heads)
            label = f"{layer}-{text[0]}"
            found += [
                Scene(f"a head's output zeroed, {text}", f"zero-o-{label}", zero_output(*place), options),
                Scene(f"a head's queries zeroed, {text}", f"zero-q-{label}", zero_query(*place), options),
            ]
        # Same text: every layer, since this is the smallest of the changes.
        for layer in range(layers) if options is same else range(1, layers, 6):
            name = f"noise-{layer}-{text[0]}"
            found.append(Scene(f"2 % noise on one q_proj, {text}", name, noisy_query(layer), options))
    return found


def measure(name: str, keep: Path, sequences: int, length: int) -> None:
    """Scans every scene that the folder does not hold yet."""
    checkpoint = open_checkpoint(name, LoadOptions(dtype="float32"))
    base = Scene("baseline", "base", untouched, {"seed": BASE_SEED})
    config = checkpoint.model.config
    every = [base, *scenes(config.num_hidden_layers, config.num_attention_heads)]
    for number, scene in enumerate(every, 1):
        folder, began = keep / scene.name, time.monotonic()
        if folder.exists():
            continue
        options = {"num_sequences": sequences, "seq_len": length, "self_check": False, **scene.options}
        if "dtype" in options:
            run = scan(name, **options)
        else:
            with scene.plant(checkpoint.model):
                run = scan(checkpoint.model, tokenizer=checkpoint.tokenizer, **options)
        run.save(folder)
        spent = time.monotonic() - began
        print(f"scanned {scene.name} ({number} of {len(every)}, {spent:.0f} s)", file=sys.stderr, flush=True)


def table(name: str, keep: Path, policy: Policy) -> str:
    """One row per group: scans, how many failed the gate, fewest and most breaches of a scan."""
    checkpoint = open_checkpoint(name, LoadOptions(dtype="float32"))
    config = checkpoint.model.config
    baseline = baseline_of(load_run(keep / "base"))
    groups: dict[str, list[tuple[str, int]]] = {}
    for scene in scenes(config.num_hidden_layers, config.num_attention_heads):
        verdict = check(load_run(keep / scene.name), baseline, policy)
        groups.setdefault(scene.group, []).append((scene.name, len(verdict.breaches)))
    lines = ["| what differs from the baseline | scans | failed | breaches, fewest to most |", "|---|---:|---:|---:|"]
    for group, results in groups.items():
        counts = sorted(count for _, count in results)
        failed = sum(count > 0 for count in counts)
        lines.append(f"| {group} | {len(counts)} | {failed} | {counts[0]} to {counts[-1]} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--keep", type=Path, required=True, help="folder of the scans")
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=128)
    parser.add_argument("--policy", type=Path)
    parser.add_argument("--scan-only", action="store_true")
    arguments = parser.parse_args()
    measure(arguments.model, arguments.keep, arguments.sequences, arguments.seq_len)
    if not arguments.scan_only:
        print(table(arguments.model, arguments.keep, read_policy(arguments.policy)))


if __name__ == "__main__":
    main()
