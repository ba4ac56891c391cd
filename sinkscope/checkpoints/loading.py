"""Loads and checks a checkpoint on a device, in a dtype: its base model or, for losses, the causal language model."""

from __future__ import annotations

import inspect
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sinkscope.capture.loops import preload
from sinkscope.capture.private_doors import base_class, has_sdpa
from sinkscope.checkpoints.adapter_files import AdapterFolder
from sinkscope.checkpoints.adapters import adapted, adapter_asked
from sinkscope.checkpoints.bounds import Bounds
from sinkscope.checkpoints.causal import need_causal
from sinkscope.checkpoints.checkpoint import Checkpoint, add_facts
from sinkscope.checkpoints.dequantizing import Report, dequantizing, silent
from sinkscope.checkpoints.hashing import Hashing
from sinkscope.checkpoints.keys import check_gguf_layers, check_keys
from sinkscope.checkpoints.load_errors import why_not_loaded
from sinkscope.checkpoints.measurable import check_finite, check_object
from sinkscope.checkpoints.names import check_dtype
from sinkscope.checkpoints.placement import Placement
from sinkscope.checkpoints.quiet import quiet_transformers
from sinkscope.checkpoints.sources import Source, find_source, first_line, weight_paths
from sinkscope.checkpoints.stored_types import check_stored_types
from sinkscope.checkpoints.tokenizers import load_tokenizer
from sinkscope.checkpoints.weight_files import stamps
from sinkscope.checkpoints.wrappers import inner_model, wrapped_name
from sinkscope.errors import OutOfMemory, SinkscopeError


@dataclass(frozen=True)
class LoadOptions:
    """How to load; the names and defaults are the command line's.

    Attributes:
        device_map: `auto`, or accelerate's map of module paths to devices (`cpu`, `disk`, a GPU's number).
        head: load the language-model head too.
        tensor_parallel: processes that the heads are spread over.
        adapter: folder of a PEFT adapter that is put into the model.
    """

    revision: str | None = None
    device: str = "auto"
    device_map: str | dict[str, Any] | None = None
    dtype: str = "auto"
    trust_remote_code: bool = False
    allow_pickle: bool = False
    head: bool = False
    tensor_parallel: int = 1
    adapter: str | None = None


def open_checkpoint(name: str, options: LoadOptions = LoadOptions(), report: Report = silent) -> Checkpoint:
    """Loads a MODEL argument, and `report`s. Raises SinkscopeError, in one line, for anything that is wrong with it."""
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype)
    adapter = adapter_asked(options.adapter, options.device_map is not None or options.tensor_parallel > 1)
    source = find_source(name, options.revision, options.allow_pickle, report)
    report("loading", 0, 0)
    stored = weight_paths(source) if source.folder else []
    noted = stamps([*stored, *(adapter.paths if adapter else [])])
    began = time.perf_counter()
    with Hashing(stored) as hashing:
        checkpoint = _open(source, options, (device, dtype), adapter, hashing, report)
    spent = time.perf_counter() - began
    checkpoint.seconds = {"loading": spent, "hash": hashing.seconds, "wait_for_hash": hashing.waited}
    checkpoint.weights |= noted
    checkpoint.check_unchanged()
    return checkpoint


def _open(
    source: Source, options: LoadOptions, target: tuple[torch.device, torch.dtype | str], adapter: AdapterFolder | None,
    hashing: Hashing, report: Report,
) -> Checkpoint:  # fmt: skip
    """Loads the checkpoint that was found, onto a device and in a dtype."""
    name, (device, dtype) = source.name, target
    counted = dequantizing(report) if source.gguf else nullcontext()
    with quiet_transformers(bars_too=source.gguf is not None), counted:
        model, warnings = _load_model(source, options, dtype)
        tokenizer, problem = load_tokenizer(source, options.trust_remote_code)
    report("loading", 0, 0)
    if options.device_map is None and options.tensor_parallel == 1:
        model = _to_device(model, device)
    model.eval()
    files = weight_paths(source, getattr(type(model.config), "extra_files", ()))
    check_stored_types(name, model, files)
    warnings += [line for file in files if source.gguf for line in check_gguf_layers(name, model, file)]
    check_finite(name, model)
    noted = stamps(files)
    if device.type == "cpu" and hashing.running:
        preload()  # the scan will want them, and until then the thread hashes on
    facts = {
        "id": name,
        "revision": source.revision,
        "weights_sha256": hashing.joined(files),
        "tokenizer": type(tokenizer).__name__ if tokenizer is not None else None,
    }
    if adapter is not None:
        warnings += adapted(name, model, adapter, facts)
    checkpoint = Checkpoint(name, model, tokenizer, facts, problem, warnings)
    checkpoint.origin = {"pretrained_model_name_or_path": source.location, "revision": source.revision or "main"}
    checkpoint.origin["trust_remote_code"] = options.trust_remote_code
    checkpoint.weights = noted
    add_facts(checkpoint)
    return checkpoint


def wrap_model(model: Any, tokenizer: Any = None, head: bool = False) -> Checkpoint:
    """Wraps a loaded model object without changing it: its base model is measured, with `head` the whole model.

    Of a wrapped model (DataParallel, torch.compile, PEFT), the model inside is measured, with its adapters. Raises
    SinkscopeError for a model with a module in training mode, whose dropout would make every number random, without
    weights in memory, or with weights that hold NaN or infinity; with `head`, also for a model that is not a causal
    language model.
    """
    given = model
    model = inner_model(model) if isinstance(model, nn.Module) else model
    if not isinstance(model, nn.Module) or not hasattr(model, "config"):
        raise SinkscopeError(
            f"a transformers model or a name is needed, not {type(given).__name__}: where it holds one, give that"
        )
    if head:
        need_causal(type(model).__name__, [type(model).__name__])
    base = model if head else inner_model(unwrapped(model))
    check_object(base)
    name = wrapped_name(given)
    check_finite(name, base)
    facts = {
        "id": name,
        "revision": None,
        "weights_sha256": None,
        "tokenizer": type(tokenizer).__name__ if tokenizer is not None else None,
    }
    checkpoint = Checkpoint(name, base, tokenizer, facts)
    add_facts(checkpoint)
    return checkpoint


def unwrapped(model: nn.Module) -> nn.Module:
    """Returns the part of a model that reads its input and has no head.

    A decoder used alone has a wrapper around it whose forward only passes its arguments on: the decoder is returned.
    Where the base model does not take the main input, the whole model is returned.
    """
    base = getattr(model, "base_model", model)
    parameters = inspect.signature(base.forward).parameters
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    decoder = getattr(base, "decoder", None)
    passes_on = {parameter.kind for parameter in parameters.values()} <= variable
    if passes_on and isinstance(decoder, nn.Module) and hasattr(decoder, "config"):
        return decoder
    return base if getattr(base, "main_input_name", "input_ids") in parameters else model


def pick_device(name: str) -> torch.device:
    """`auto` = cuda, then mps, then cpu. Raises SinkscopeError for a device this machine does not have."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except Exception as error:  # each backend that is absent has an exception of its own
        raise SinkscopeError(f"device {name!r} is not available here: use cpu or auto ({first_line(error)})") from None
    if device.type == "meta":
        raise SinkscopeError("device 'meta' holds no numbers: use cpu, cuda or auto")
    return device


def pick_dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return "auto"
    check_dtype(name)
    found: torch.dtype = getattr(torch, name)
    return found


def _load_model(source: Source, options: LoadOptions, dtype: torch.dtype | str) -> tuple[nn.Module, list[str]]:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

    from sinkscope.checkpoints.trigger.model import register

    register()
    placement = Placement(options.device_map, options.tensor_parallel)
    common: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if source.revision:
        common["revision"] = source.revision
    if source.gguf:
        common["gguf_file"] = source.gguf
    try:
        with placement, Bounds(source):
            config = AutoConfig.from_pretrained(source.location, **common)
            placement.check(source.name, config)
            if options.head:
                need_causal(source.name, getattr(config, "architectures", None) or [])
            family = AutoModelForCausalLM if options.head else AutoModel
            model, report = family.from_pretrained(
                source.location,
                dtype=torch.float32 if source.gguf and dtype == "auto" else dtype,
                attn_implementation=_implementation(config),
                use_safetensors=None if source.gguf else not source.pickled,
                weights_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # the report names them; transformers' own error does not
                **placement.arguments,
                **common,
            )
    except SinkscopeError:
        raise
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            f"{source.name} does not fit into the device's memory: try --dtype, --device-map auto"
        ) from None
    except Exception as error:  # any defect of a checkpoint becomes one line
        raise SinkscopeError(why_not_loaded(source, error)) from error
    placement.settle(model)
    return model, check_keys(source.name, model, report)


def _implementation(config: Any) -> str | None:
    """Returns `sdpa`, so that transformers picks no hub kernel or flash package; None where the family has no sdpa."""
    return "sdpa" if has_sdpa(base_class(config)) else None


def _to_device(model: nn.Module, device: torch.device) -> nn.Module:
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise OutOfMemory(f"the model does not fit on {device}: try --dtype bfloat16 or --device-map auto") from None
