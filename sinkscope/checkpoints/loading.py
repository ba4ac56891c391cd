"""Loads and checks a checkpoint on a device, in a dtype: its base model or, for losses, the causal language model."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.capture.loops import preload
from sinkscope.capture.output_projection import quantiser
from sinkscope.capture.private_doors import base_class, has_sdpa
from sinkscope.checkpoints.adapter_files import AdapterFolder
from sinkscope.checkpoints.adapters import adapted, adapter_asked
from sinkscope.checkpoints.checkpoint import Checkpoint, add_facts, configuration, quantization, tokenizer_hash
from sinkscope.checkpoints.checks import (
    check_experts,
    check_finite,
    check_gguf_layers,
    check_keys,
    check_object,
    check_stored_types,
    need_causal,
)
from sinkscope.checkpoints.classes import code_left_out, of_class, unwrapped
from sinkscope.checkpoints.dtypes import give_asked_dtype
from sinkscope.checkpoints.gguf_files import dequantizing
from sinkscope.checkpoints.placement import NO_PLAN, Placement
from sinkscope.checkpoints.private_doors import lacks_tensor_plan, unpack
from sinkscope.checkpoints.quiet import Report, quiet_transformers, silent
from sinkscope.checkpoints.sources import LoadOptions, Source, check_dtype, find_source, weight_paths
from sinkscope.checkpoints.tokenizers import check_tokenizer, load_tokenizer, why_not_loaded
from sinkscope.checkpoints.weight_files import Hashing, stamps
from sinkscope.checkpoints.wrappers import inner_model, wrapped_name
from sinkscope.errors import OutOfMemory, SinkscopeError, first_line
from sinkscope.lookup import Lookup

FAMILIES: Lookup[Callable[[], None]] = Lookup("model family", {"trigger": "sinkscope.trigger.model:register"})
"""Families of models that sinkscope brings itself: each makes itself known to transformers."""

LARGE = 2**28
"""Bytes of weights that take as long to load as the compiled loops, which a thread then loads meanwhile."""

PLACINGS = ("auto", "balanced", "balanced_low_0", "sequential")
"""Ways in which accelerate can spread a model by itself."""


def open_checkpoint(name: str, options: LoadOptions = LoadOptions(), report: Report = silent) -> Checkpoint:
    """Loads a MODEL argument, and `report`s. Raises SinkscopeError, in one line, for anything that is wrong with it."""
    report("loading", 0, 0)
    device = pick_device(options.device)
    dtype = pick_dtype(options.dtype)
    check_device_map(options.device_map)
    adapter = adapter_asked(options.adapter, options.device_map is not None or options.tensor_parallel > 1)
    source = find_source(name, options.revision, options.allow_pickle, report).fetched(report)
    report("loading", 0, 0)
    stored = weight_paths(source) if source.folder else []
    noted = stamps([*stored, *(adapter.paths if adapter else [])])
    began = time.perf_counter()
    hashing = Hashing(stored)
    try:
        with _loops_beside(device, stored):
            checkpoint = _open(source, options, (device, dtype), adapter, hashing, report)
        spent = time.perf_counter() - began
        checkpoint.seconds = {"loading": spent, "hash": hashing.seconds, "wait_for_hash": hashing.waited}
        checkpoint.weights |= noted
        checkpoint.check_unchanged()
    except BaseException:
        hashing.stop()
        raise
    return checkpoint


@contextmanager
def _loops_beside(device: torch.device, stored: list[Path]) -> Iterator[None]:
    """A thread loads the compiled loops while the block loads large weights: the scan will want them."""
    pool = ThreadPoolExecutor(1, "sinkscope-preload")
    if device.type == "cpu" and sum(file.stat().st_size for file in stored) >= LARGE:
        pool.submit(preload)
    try:
        yield
    finally:
        pool.shutdown(wait=False)  # who needs a loop sooner waits for its import


def _open(
    source: Source, options: LoadOptions, target: tuple[torch.device, torch.dtype | str], adapter: AdapterFolder | None,
    hashing: Hashing, report: Report,
) -> Checkpoint:  # fmt: skip
    """Loads the checkpoint that was found, onto a device and in a dtype."""
    name, (device, dtype) = source.name, target
    counted = dequantizing(report) if source.gguf else nullcontext()
    for register in FAMILIES.values():
        register()
    with quiet_transformers(bars_too=source.gguf is not None), counted, ThreadPoolExecutor(1) as beside:
        tokenizer, problem = load_tokenizer(source, options.trust_remote_code)
        digest = beside.submit(tokenizer_hash, tokenizer)
        model, warnings, coding = _load_model(source, options, dtype)
    with quiet_transformers(bars_too=True):
        unpack(model)
    report("loading", 0, 0)
    if options.device_map is None and options.tensor_parallel == 1:
        model = _to_device(model, device)
    model.eval()
    files = weight_paths(source, getattr(type(model.config), "extra_files", ()))
    if coding is None:
        check_stored_types(name, model, files)
    warnings += [line for file in files if source.gguf for line in check_gguf_layers(name, model, file)]
    check_experts(name, model)
    check_finite(name, model)
    noted = stamps(files)
    later = options.hash_later and adapter is None
    facts = _named(name, tokenizer, source.revision, None if later else hashing.joined(files))
    warnings += [source.warning] if source.warning else []
    if adapter is not None:
        warnings += adapted(name, model, adapter, facts)
    checkpoint = Checkpoint(name, model, tokenizer, facts, problem, warnings)
    common = source.arguments(options.trust_remote_code)
    checkpoint.origin = {"pretrained_model_name_or_path": source.location, "revision": "main", **common}
    checkpoint.weights = noted
    checkpoint.hashing, checkpoint.hashed = hashing, files
    if not later:
        checkpoint.close()
    add_facts(checkpoint, digest.result)
    checkpoint.facts["quantization"] = checkpoint.facts["quantization"] or coding
    return checkpoint


def wrap_model(model: Any, tokenizer: Any = None, head: bool = False) -> Checkpoint:
    """Wraps a loaded model object without changing it: its base model is measured, with `head` the whole model.

    A module that is no transformers model is measured whole; it has no configuration, whose facts then stay empty.
    Of a wrapped model (DataParallel, torch.compile, PEFT), the model inside is measured, with its adapters. Raises
    SinkscopeError for a model with a module in training mode, whose dropout would make every number random, without
    weights in memory, or with weights that hold NaN or infinity; with `head`, also for a model that is not a causal
    language model.
    """
    outer = model
    model = inner_model(model) if isinstance(model, nn.Module) else model
    if isinstance(model, PathLike):
        raise SinkscopeError(f"a folder is given as text: {str(model)!r}, not {model!r}")
    if not isinstance(model, nn.Module):
        raise SinkscopeError(
            f"a model (torch.nn.Module) or a name is needed, not {type(outer).__name__}: where it holds one, give that"
        )
    if head:
        need_causal(type(model).__name__, [type(model).__name__], configuration(model))
    with quiet_transformers(bars_too=True):
        unpack(model)
    base = model if head or configuration(model) is None else inner_model(unwrapped(model))
    check_object(base)
    name = wrapped_name(outer)
    check_experts(name, base)
    check_finite(name, base)
    check_tokenizer(tokenizer)
    checkpoint = Checkpoint(name, base, tokenizer, _named(name, tokenizer))
    add_facts(checkpoint)
    return checkpoint


def wrap_running(model: Any, tokenizer: Any = None, name: str | None = None) -> Checkpoint:
    """Wraps a model that somebody else runs, whole and as it stands: in training mode, or before its weights are there.

    Of a wrapped model, it is the model inside, which the wrapper calls. Raises SinkscopeError for what is no module,
    and for one that FSDP or DeepSpeed has spread.
    """
    if not isinstance(model, nn.Module):
        raise SinkscopeError(f"a model (torch.nn.Module) is needed, not {type(model).__name__}")
    check_tokenizer(tokenizer)
    inner, shown = inner_model(model), name or wrapped_name(model)
    checkpoint = Checkpoint(shown, inner, tokenizer, _named(shown, tokenizer))
    add_facts(checkpoint)
    return checkpoint


def _named(name: str, tokenizer: Any, revision: str | None = None, weights_sha256: str | None = None) -> dict[str, Any]:
    """The facts that name a model: those of an object have no revision and no files."""
    return {
        "id": name,
        "revision": revision,
        "weights_sha256": weights_sha256,
        "tokenizer": None if tokenizer is None else type(tokenizer).__name__,
    }


def pick_device(name: str) -> torch.device:
    """`auto` = cuda, then mps, then cpu. Raises SinkscopeError for a name that is no device, and for a device that this
    machine does not have."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
    except Exception:
        raise SinkscopeError(f"device {name!r} is none: use auto, cpu, cuda, cuda:N or mps") from None
    try:
        torch.empty(1, device=device)
    except Exception as error:  # each backend that is absent has an exception of its own
        raise SinkscopeError(f"device {name!r} is not available here: use cpu or auto ({first_line(error)})") from None
    if device.type == "meta":
        raise SinkscopeError("device 'meta' holds no numbers: use cpu, cuda or auto")
    return device


def check_device_map(value: str | dict[str, Any] | None) -> None:
    """Raises SinkscopeError for a map with a place that is not here. The disk is a place in a dictionary alone."""
    ways = PLACINGS if isinstance(value, str) else ("disk",)
    for place in value.values() if isinstance(value, dict) else [value]:
        if place is None or place in ways:
            continue
        try:
            pick_device("" if place == "auto" else f"cuda:{place}" if isinstance(place, int) else str(place))
        except SinkscopeError:
            raise SinkscopeError(
                f"--device-map {place!r} is no place on this machine: give {', '.join(ways)}, cpu, or a GPU that "
                "is here (cuda:0)"
            ) from None


def pick_dtype(name: str) -> torch.dtype | str:
    """The torch dtype of `--dtype`; `auto`, which transformers reads from the checkpoint, stays a word.

    Raises SinkscopeError for a name that is no dtype.
    """
    if name == "auto":
        return "auto"
    check_dtype(name)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _load_model(
    source: Source, options: LoadOptions, dtype: torch.dtype | str
) -> tuple[nn.Module, list[str], str | None]:
    """The model, warnings, and how its files say that they are quantised. transformers may turn codes into plain
    weights, of which the loaded model's configuration says nothing any more."""
    from transformers import AutoConfig

    placement = Placement(options.device_map, options.tensor_parallel)
    common = source.arguments(options.trust_remote_code)
    # transformers asks for an adapter's configuration apart from the rest, with arguments of its own.
    adapter = {"adapter_kwargs": {"local_files_only": True}} if common.get("local_files_only") else {}
    if source.gguf:
        common["gguf_file"] = source.gguf
    try:
        with placement:
            config = AutoConfig.from_pretrained(source.location, **common)
            placement.check(source.name, config)
            if options.head:
                need_causal(source.name, getattr(config, "architectures", None) or [], config)
            arguments = {
                "dtype": torch.float32 if source.gguf and dtype == "auto" else dtype,
                "attn_implementation": implementation(config),
                "use_safetensors": None if source.gguf else not source.pickled,
                "weights_only": True,
                "output_loading_info": True,
                "ignore_mismatched_sizes": True,  # the report names them; transformers' own error does not
                **placement.arguments,
                **common,
                **adapter,
            }
            model, report = of_class(source, config, options.head, arguments)
    except SinkscopeError:
        raise
    except torch.OutOfMemoryError:
        raise OutOfMemory(
            f"{source.name} does not fit into the device's memory: try --dtype, --device-map auto"
        ) from None
    except SystemExit as error:
        raise SinkscopeError(why_not_loaded(source, error)) from error
    except Exception as error:  # any defect of a checkpoint becomes one line
        raise SinkscopeError(NO_PLAN if lacks_tensor_plan(error) else why_not_loaded(source, error)) from error
    placement.settle(model)
    coding = None if source.gguf else quantization(config)
    if coding and not quantization(model.config) and not quantiser(model):
        give_asked_dtype(model)
    left_out = [] if options.trust_remote_code else code_left_out(source.name, model)
    warnings = [*check_keys(source.name, model, report), *left_out]
    return model, warnings, coding


def implementation(config: Any) -> str | None:
    """Returns `sdpa`, so that transformers picks no hub kernel or flash package; None where the family has no sdpa."""
    return "sdpa" if has_sdpa(base_class(config)) else None


def _to_device(model: nn.Module, device: torch.device) -> nn.Module:
    try:
        return model.to(device)
    except torch.OutOfMemoryError:
        raise OutOfMemory(f"the model does not fit on {device}: try --dtype bfloat16 or --device-map auto") from None
