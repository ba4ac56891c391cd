"""Quantises a model while it is loaded, and scans it: one command for each method.

    sinkscope scan example:gemma-3-270m --num-sequences 8 --measure all --out runs/plain
    python examples/quantised.py nf4 --out runs/nf4
    sinkscope compare runs/plain runs/nf4

A method needs its package: bitsandbytes, torchao, optimum-quanto, compressed-tensors, hqq, or optimum and gptqmodel.
docs/quantised.md shows what came out.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
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


def passages() -> list[str]:
    """Multilingual text to calibrate on, which the scan does not read."""
    files = sorted((Path(sinkscope.__file__).parent / "data" / "multilingual").glob("*.txt"))
    return [file.read_text("utf-8")[:600] for file in files[:16]]


def gptq(place: str) -> Any:
    """Four bits in groups of 64 weights."""
    return transformers.GPTQConfig(
        bits=4, group_size=64, dataset=passages(), tokenizer=transformers.AutoTokenizer.from_pretrained(place)
    )


def awq(place: str, target: str) -> None:
    """Writes a folder of AWQ: four bits in groups of 64 weights. GPTQModel leaves its log in ./logs."""
    # GPTQModel asks for two threads that load; on a machine of two cores it would allow one.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
    from gptqmodel.quantization import FORMAT, METHOD

    coding = QuantizeConfig(bits=4, group_size=64, quant_method=METHOD.AWQ, format=FORMAT.GEMM)
    model = GPTQModel.load(place, coding, device="cpu")
    model.quantize(passages(), batch_size=1, backend=BACKEND.AWQ_TORCH)  # the others pack on a GPU alone
    model.save(target)


def compress(place: str, target: str, bits: int) -> None:
    """Writes a folder of compressed-tensors: every linear layer but the head, rounded to the nearest code, with a scale
    for each row (8 bits) or each 64 weights of a row (4 bits)."""
    from compressed_tensors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        QuantizationStatus,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    model = transformers.AutoModelForCausalLM.from_pretrained(place)
    kind = {"strategy": "group", "group_size": 64} if bits == 4 else {"strategy": "channel"}
    coded = QuantizationArgs(num_bits=bits, type="int", symmetric=True, **kind)
    scheme = QuantizationScheme(targets=["Linear"], weights=coded)
    apply_quantization_config(model, QuantizationConfig(config_groups={"all": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if not hasattr(module, "quantization_scheme"):
            continue
        rows = module.weight.detach()
        groups = rows.unflatten(1, (-1, 64)) if bits == 4 else rows.unsqueeze(1)
        scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), coded)
        module.weight_scale.data.copy_(scale)
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(target)
    compressor.update_config(target)


def hqq(model: torch.nn.Module) -> None:
    """Puts HQQ's own layers in place of every linear layer but the head: four bits in groups of 64 weights."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    settings = BaseQuantizeConfig(nbits=4, group_size=64)
    for path, layer in [*model.named_modules()]:
        parent, _, name = path.rpartition(".")
        if isinstance(layer, torch.nn.Linear) and name != "lm_head":
            coded = HQQLinear(layer, settings, compute_dtype=torch.float32, device="cpu")
            setattr(model.get_submodule(parent), name, coded)


METHODS: dict[str, Callable[[str], Any]] = {
    "plain": lambda _: None,
    "bnb-int8": lambda _: bitsandbytes(load_in_8bit=True),
    "nf4": lambda _: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "fp4": lambda _: bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
    "ao-int8": lambda _: torchao("Int8WeightOnlyConfig"),
    "ao-int8-dynamic": lambda _: torchao("Int8DynamicActivationInt8WeightConfig"),
    "ao-fp8": lambda _: torchao("Float8WeightOnlyConfig"),
    "ao-int4": lambda _: torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4),
    "quanto-int8": lambda _: transformers.QuantoConfig(weights="int8"),
    "quanto-int4": lambda _: transformers.QuantoConfig(weights="int4"),
    "gptq": gptq,
    "fp8": lambda _: transformers.FineGrainedFP8Config(),
    "mxfp4": lambda _: transformers.Mxfp4Config(),
}
"""The configuration with which transformers quantises the model at a place while it loads it."""

SAVED: dict[str, Callable[[str, str], None]] = {
    "ct-int8": partial(compress, bits=8),
    "ct-int4": partial(compress, bits=4),
    "awq": awq,
}
"""Writes a quantised copy of the model at a place into a folder."""

CHANGED: dict[str, Callable[[torch.nn.Module], None]] = {"hqq": hqq}
"""Quantises a loaded model."""


def main() -> None:
    """Reads the command line, loads, scans, and saves the run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("method", choices=[*METHODS, *SAVED, *CHANGED])
    parser.add_argument("--model", default="example:gemma-3-270m", help="a folder, a hub id, or example:NAME")
    parser.add_argument("--out", required=True)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--num-sequences", type=int, default=8)
    given = parser.parse_args()
    place = given.model
    if place.startswith(EXAMPLE):
        place = str(example_folder(place.removeprefix(EXAMPLE)))
    tokenizer = transformers.AutoTokenizer.from_pretrained(place)
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {}
        if given.method in SAVED:
            SAVED[given.method](place, folder)
            place = folder  # its config.json says how it is quantised
        elif given.method in METHODS:
            settings["quantization_config"] = METHODS[given.method](place)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, device_map="cpu", **settings)
        if given.method in CHANGED:
            CHANGED[given.method](model)
    run = sinkscope.scan(
        model.eval(), tokenizer=tokenizer, name=given.method, seq_len=given.seq_len,
        num_sequences=given.num_sequences, measure="all",
    )  # fmt: skip
    run.save(given.out, force=True)
    print(f"{given.method}: self-check {run.manifest.self_check.status}, {given.out}")


if __name__ == "__main__":
    try:
        main()
    except ImportError as error:  # a method's package
        raise SystemExit(f"quantised.py: {error}") from None
