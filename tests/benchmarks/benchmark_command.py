"""Seconds of whole commands beside those of the shortest script that does as much without measuring anything.

    python tests/benchmarks/benchmark_command.py FOLDER              12 interleaved pairs of each
    python tests/benchmarks/benchmark_command.py FOLDER 5 long start

Into FOLDER go checkpoints of two small shapes with random weights, 0.5 and 2 GB, which stay there for the next time.
The parts:

    long, short  `sinkscope scan` of 32 x 256 and of 4 x 64 tokens, beside a script that loads the same model with its
                 head and runs it on as many tokens, in batches of the same size
    start        from the start of Python to the first batch of a scan of the large one, beside the imports and
                 from_pretrained

Every process starts anew; each pair runs in the other order than the last one. One pair before them is not counted: it
compiles what is not compiled yet, as pip does when it installs, and reads the files into memory. Printed are medians of
wall time and of processor time on all cores, and the median and range of the pairs' ratios.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SCRIPT = """
import sys, torch
from transformers import AutoModelForCausalLM
folder, count, length = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = AutoModelForCausalLM.from_pretrained(folder)
with torch.no_grad():
    for batch in torch.randint(4, 40_000, (count, length)).split(max(1, 2048 // length)):
        model(batch).logits
"""
FIRST_BATCH = """
import os, sys
import sinkscope
def report(stage, done, total):
    if stage == "scanning":
        os._exit(0)
sinkscope.scan(sys.argv[1], progress=report)
"""
LOADED = """
import sys, torch
from transformers import AutoModel
AutoModel.from_pretrained(sys.argv[1])
"""


def save(folder: Path, name: str) -> Path:
    """Saves model A or B of benchmark_scan with a tokenizer, whose merges are learned from this Python's own source."""
    target = folder / name
    if (target / "tokenizer.json").exists():
        return target
    from benchmark_scan import MODELS
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer, rules.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    text = sorted(map(str, Path(os.__file__).parent.glob("**/*.py")))[:400]
    trainer: Any = trainers.BpeTrainer(
        vocab_size=40_000, special_tokens=["<s>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    rules.train(text, trainer)
    MODELS[name]().save_pretrained(target)
    PreTrainedTokenizerFast(tokenizer_object=rules, bos_token="<s>").save_pretrained(target)
    return target


def seconds(words: list[str], compiled: Path) -> tuple[float, float]:
    """Wall time and processor time of a process that keeps compiled modules in the folder `compiled`."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = str(compiled)
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *words], check=True, capture_output=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - began, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def pairs_of(what: str, ours: list[str], theirs: list[str], count: int, compiled: Path) -> None:
    """Runs both in turn and prints what they took."""
    taken: list[tuple[tuple[float, float], tuple[float, float]]] = []
    for number in range(count + 1):
        if number % 2:
            first = seconds(ours, compiled)
            taken.append((first, seconds(theirs, compiled)))
        else:
            second = seconds(theirs, compiled)
            taken.append((seconds(ours, compiled), second))
    for place, clock in enumerate(("wall", "processor")):
        own, other = ([each[side][place] for each in taken[1:]] for side in (0, 1))
        ratios = [a / b for a, b in zip(own, other, strict=True)]
        print(
            f"{what:>6} {clock:>9}: {statistics.median(own):6.2f} s beside {statistics.median(other):6.2f} s, "
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}), {count} pairs",
            flush=True,
        )


def main(folder: Path, count: int, parts: list[str]) -> None:
    out, compiled = ["--out", str(folder / "run"), "--force", "--quiet"], folder / "compiled"
    for part, (sequences, tokens) in {"long": (32, 256), "short": (4, 64)}.items():
        if part in parts:
            model = str(save(folder, "A"))
            asked = ["--num-sequences", str(sequences), "--seq-len", str(tokens)]
            ours = ["-m", "sinkscope", "scan", model, *asked, *out]
            pairs_of(part, ours, ["-c", SCRIPT, model, str(sequences), str(tokens)], count, compiled)
    if "start" in parts:
        model = str(save(folder, "B"))
        pairs_of("start", ["-c", FIRST_BATCH, model], ["-c", LOADED, model], count, compiled)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit("give a folder")
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["12"])[0]), sys.argv[3:] or ["long", "short", "start"])
