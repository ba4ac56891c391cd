"""Peak memory and time of a scan of a checkpoint with the shape of Llama-3-8B, random weights, on a machine of 24 GiB.

    python tests/benchmarks/measure_8b.py FOLDER [LAYERS]

Writes the checkpoint (bfloat16, sharded safetensors, 16 GB) into FOLDER, scans two sequences of 256 tokens with it in
memory, and again with the last eight layers on disk, each in a process of its own, and removes FOLDER. LAYERS below 32
try the script out. Peak memory is the process's largest resident memory, which counts the pages of files it has mapped.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

LAYERS, ON_DISK = 32, 8
SEQUENCES, LENGTH = 2, 256
HIDDEN, INNER, KEYS, VOCABULARY = 4096, 14_336, 1024, 128_256
LAYER = {
    "self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KEYS, HIDDEN), "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN), "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER), "input_layernorm": (HIDDEN,), "post_attention_layernorm": (HIDDEN,),
}  # fmt: skip
"""The weights of a layer and their shapes."""


def shards(layers: int) -> list[dict[str, tuple[int, ...]]]:
    """Names and shapes of the weights of each file: one a layer, and one each for what stands around them."""
    own = [{f"model.layers.{number}.{name}.weight": shape for name, shape in LAYER.items()} for number in range(layers)]
    ends = [{"model.embed_tokens.weight": (VOCABULARY, HIDDEN), "model.norm.weight": (HIDDEN,)}]
    return [*own, *ends, {"lm_head.weight": (VOCABULARY, HIDDEN)}]


def drawn(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """A norm's gain is 1; every other weight is drawn with the standard deviation of Llama's own start."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)


def write(folder: Path, layers: int) -> int:
    """Writes the checkpoint, never more than one file's weights in memory; returns the bytes of all weights."""
    folder.mkdir(parents=True)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=layers,
        num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192, dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    generator, index, size = torch.Generator().manual_seed(0), dict[str, str](), 0
    files = shards(layers)
    for number, shapes in enumerate(files, 1):
        file = f"model-{number:05}-of-{len(files):05}.safetensors"
        weights = {name: drawn(shape, generator) for name, shape in shapes.items()}
        save_file(weights, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(shapes, file)
        size += sum(weight.nbytes for weight in weights.values())
    text = json.dumps({"metadata": {"total_size": size}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    return size


def device_map(layers: int) -> dict[str, str]:
    """The last eight layers on disk, or half of fewer."""
    on_disk = min(ON_DISK, layers // 2)
    places = {f"layers.{number}": "cpu" if number < layers - on_disk else "disk" for number in range(layers)}
    return {"embed_tokens": "cpu", "rotary_emb": "cpu", "norm": "cpu"} | places


def scan(folder: Path, kind: str, layers: int) -> None:
    """Scans the checkpoint and prints what became of it, as JSON."""
    import sinkscope

    ids = torch.randint(VOCABULARY, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(0))
    options: dict[str, Any] = {} if kind == "memory" else {"device_map": device_map(layers)}
    stages = dict[str, float]()

    def progress(stage: str, done: int, total: int) -> None:
        stages.setdefault(stage, time.perf_counter())

    began = time.perf_counter()
    run = sinkscope.scan(str(folder), data=ids, progress=progress, **options)
    ended = time.perf_counter()
    edges = [*stages.values(), ended]
    print(json.dumps({
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "seconds": ended - began,
        "stages": {name: after - start for (name, start), after in zip(stages.items(), edges[1:], strict=True)},
        "device": run.manifest.model.device,
        "self_check": run.manifest.self_check.status,
        "heads": len(run.heads),
        "missing": int(run.heads["bos_mass"].isna().sum()),
    }))  # fmt: skip


def main(folder: Path, layers: int) -> None:
    began = time.perf_counter()
    try:
        size = write(folder, layers)
        print(f"weights {size / 2**30:.2f} GiB, written in {time.perf_counter() - began:.0f} s", flush=True)
        for kind in ("memory", "disk"):
            words = [sys.executable, __file__, str(folder), str(layers), kind]
            done = subprocess.run(words, check=False, capture_output=True, text=True)
            if done.returncode:
                print(f"{kind}: exit {done.returncode}: {done.stderr[-1000:]}", flush=True)
                continue
            found = json.loads(done.stdout.splitlines()[-1])
            over = (found["peak"] - size) / 2**30
            stages = ", ".join(f"{name} {spent:.0f} s" for name, spent in found["stages"].items())
            print(
                f"{kind}: peak {found['peak'] / 2**30:.2f} GiB, weights {over:+.2f} GiB; {found['seconds']:.0f} s "
                f"({stages}); {found['device']}; self-check {found['self_check']}; {found['heads']} heads, "
                f"{found['missing']} without a value",
                flush=True,
            )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    if len(sys.argv) < 2 or (len(sys.argv) < 4 and Path(sys.argv[1]).exists()):
        sys.exit(f"{__doc__}\nFOLDER must not exist yet.")
    target, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else LAYERS
    if len(sys.argv) > 3:
        scan(target, sys.argv[3], count)
    else:
        main(target, count)
