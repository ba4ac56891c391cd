"""Quantises a model while it is loaded, and scans it: one command for each method.

    sinkscope scan example:gemma-3-270m --num-sequences 8 --measure all --out runs/plain
    python examples/quantised.py nf4 --out runs/nf4
    sinkscope compare runs/plain runs/nf4

A method needs its package: bitsandbytes, torchao or optimum-quanto. docs/quantised.md shows what came out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import transformers

import sinkscope
from sinkscope.checkpoints.examples import example_folder

EXAMPLE = "example:"


def bitsandbytes(**settings: Any) -> Any:
    return transformers.BitsAndBytesConfig(**settings)


def torchao(name: str, **settings: Any) -> Any:
    import torchao.quantization as coding

    return transformers.TorchAoConfig(getattr(coding, name)(**settings))


METHODS: dict[str, Callable[[], Any]] = {
    "plain": lambda: None,
    "bnb-int8": lambda: bitsandbytes(load_in_8bit=True),
    "nf4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": lambda: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "ao-int8": lambda: torchao("Int8WeightOnlyConfig"),
    "ao-int8-dynamic": lambda: torchao("Int8DynamicActivationInt8WeightConfig"),
    "ao-int4": lambda: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "quanto-int8": lambda: transformers.QuantoConfig(weights="int8"),
    "quanto-int4": lambda: transformers.QuantoConfig(weights="int4"),
    "hqq": lambda: transformers.HqqConfig(nbits=4, group_size=64),
    "fp8": transformers.FineGrainedFP8Config,
    "mxfp4": transformers.Mxfp4Config,
}


def main() -> None:
    """Reads the command line, loads, scans, and saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--model", default="example:gemma-3-270m", help="a folder, a hub id, or example:NAME")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--num-sequences", type=int, default=8)
    given = parser.parse_args()
    place = given.model
    if place.startswith(EXAMPLE):
        place = str(example_folder(place.removeprefix(EXAMPLE)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        place, quantization_config=METHODS[given.method](), device_map="cpu"
    )
    run = sinkscope.scan(
        model.eval(), tokenizer=tokenizer, name=given.method, seq_len=given.seq_len,
        num_sequences=given.num_sequences, measure="all",
    )  # fmt: skip
    run.save(given.out, force=True)
    print(f"{given.method}: self-check {run.manifest.self_check.status}, {given.out}")


if __name__ == "__main__":
    main()
