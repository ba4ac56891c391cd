"""Size of the run folder and memory of a scan at the sizes where tables grow large; needs no GPU and no checkpoint.

    python tests/benchmarks/measure_folder.py long [SEQUENCES] [TOKENS]
    python tests/benchmarks/measure_folder.py many [SEQUENCES] [LAYERS] [HEADS]

`long` scans sequences of 131,072 tokens with 32 layers of 32 heads. The attention of such sequences would take hours on
a CPU, so that random sums stand in for it: their digits compress no better than those of a model. All else is the scan.
`many` scans 20,000 sequences of 16 tokens, with nothing replaced. Memory is counted above that of the loaded model.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

import sinkscope
from sinkscope.capture.calls import AttentionCall
from sinkscope.capture.kernels import attend
from sinkscope.capture.kernels.sums import EARLY, AttentionSums
from sinkscope.engine import scan as engine
from sinkscope.experiments.bench import _reset, _resident

HEAD_DIM, VOCABULARY = 4, 512
SINKS = 8
"""Keys of each head whose alpha exceeds epsilon: rows of sinks.parquet."""


def model(layers: int, heads: int, length: int) -> LlamaModel:
    """A random model whose layers have the asked number of heads, and little else."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=heads * HEAD_DIM, intermediate_size=heads * HEAD_DIM,
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD_DIM,
        max_position_embeddings=length,
    )  # fmt: skip
    return LlamaModel(config).eval()


def random_sums(call: AttentionCall) -> tuple[Tensor, AttentionSums]:
    """Returns an output of zeros and random sums in the place of an attention call's own."""
    batch, heads, length, width = call.query.shape
    rows = torch.arange(length, 0, -1.0)
    alpha = torch.rand(batch, heads, length) / length
    alpha[..., torch.randint(length // 2, (SINKS,))] = 0.5
    first = torch.rand(batch, heads, length)
    zeros = torch.zeros(batch, heads, length)
    sums = AttentionSums(
        first=first, diagonal=torch.rand_like(first), previous=torch.rand_like(first), entropy=torch.rand_like(first),
        margin=torch.randn_like(first), learned_sink=zeros, first_is_largest=first > 0.5,
        logit_gap=torch.randn_like(first), columns=alpha * rows, early_columns=torch.rand(batch, heads, EARLY),
        visible=torch.arange(1, length + 1)[None, None], sees_first=torch.ones(1, 1, length, dtype=torch.bool),
        sees_few=torch.arange(1, length + 1).clamp(max=4)[None, None],
        seen_by=torch.arange(length, 0, -1)[None, None], early_seen_by=torch.arange(EARLY, 0, -1)[None, None],
        causal=True,
    )  # fmt: skip
    return torch.zeros(batch, length, heads, width, dtype=call.query.dtype), sums


def measured(subject: LlamaModel, sequences: int, length: int, **options: Any) -> dict[str, float]:
    """Scans random tokens into a temporary folder: seconds, MiB on disk and peak MiB, of all and of writing alone."""
    ids = torch.randint(VOCABULARY, (sequences, length))
    build, began = engine.build_run, time.perf_counter()
    _reset()
    before = _resident("VmRSS")
    found: dict[str, float] = {}

    def watched(*given: Any, **more: Any) -> Any:
        found["peak of measuring"] = _resident("VmHWM") - before
        found["held when writing begins"] = _resident("VmRSS") - before
        _reset()
        found["seconds of measuring"] = time.perf_counter() - began
        return build(*given, **more)

    engine.build_run = watched
    try:
        with tempfile.TemporaryDirectory() as folder:
            run = sinkscope.scan(subject, data=ids, self_check=False, shards=Path(folder), **options)
            files = run.save(folder)
            found["peak of writing"] = _resident("VmHWM") - before
            found["seconds of writing"] = time.perf_counter() - began - found["seconds of measuring"]
            found |= {path.name: path.stat().st_size for path in files}
            found["folder"] = sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
    finally:
        engine.build_run = build
    return found


def main(kind: str, *sizes: str) -> None:
    numbers = [int(size) for size in sizes]
    if kind == "long":
        sequences, length = numbers + [1, 131_072][len(numbers) :]
        subject = model(32, 32, length)
        attend.attend_in_blocks = lambda call, block_bytes=None: random_sums(call)
    else:
        sequences, layers, heads = numbers + [20_000, 18, 4][len(numbers) :]
        subject, length = model(layers, heads, 64), 16
    measured(model(1, 4, 64), 2, 16)  # what the libraries load on first use
    print(f"{sequences} x {length} tokens, {len(subject.layers)} x {subject.config.num_attention_heads} heads")
    for name, value in measured(subject, sequences, length).items():
        print(f"{name:28} {value:10.1f} s" if name.startswith("seconds") else f"{name:28} {value / 2**20:10.1f} MiB")


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in ("long", "many"):
        sys.exit(str(__doc__))
    main(*sys.argv[1:])
