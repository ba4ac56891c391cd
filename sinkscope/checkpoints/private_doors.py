"""The undocumented parts of transformers, peft, gguf, safetensors, FSDP and DeepSpeed that loading and saving use, each
behind one function.

Any release may move such a part. Its function then raises a SinkscopeError that names the library, its version and the
part; `tests/checkpoints/test_loading_doors.py` calls them all on the installed versions. What an error means can only
be told by its text: there the test makes the library raise it.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from sinkscope.capture.private_doors import moved
from sinkscope.errors import first_line

Watcher = tuple[int, Callable[[Any], None], Callable[[Any], None]]
"""A thread's number, and what it is told of: an opened GGUF file, the weights of a converted tensor."""

_watchers: list[Watcher] = []
_own: dict[str, Any] = {}
"""The package's own functions while they are replaced."""
_lock = threading.Lock()


# gguf: the file that transformers reads, and the tensors that it converts


@contextmanager
def watching_gguf(opened: Callable[[Any], None], converted: Callable[[Any], None]) -> Iterator[None]:
    """Calls `opened` with the reader of each GGUF file that this thread opens, and `converted` with the weights of each
    tensor that it converts, until the block ends.

    transformers takes both functions of the package anew for each file, so they are replaced there for that time. Other
    threads get what they return, and are not told of.
    """
    import gguf

    watcher = (threading.get_ident(), opened, converted)
    with _lock:
        if not _watchers:
            for place, name in enumerate(("GGUFReader", "dequantize"), 1):
                if not hasattr(gguf, name):
                    raise moved("gguf", f"gguf.{name}")
                _own[name] = getattr(gguf, name)
                setattr(gguf, name, _told(_own[name], place))
        _watchers.append(watcher)
    try:
        yield
    finally:
        with _lock:
            _watchers.remove(watcher)
            if not _watchers:
                for name, function in _own.items():
                    setattr(gguf, name, function)


def _told(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    def telling(*arguments: Any, **options: Any) -> Any:
        made = function(*arguments, **options)
        for watcher in [entry for entry in _watchers if entry[0] == threading.get_ident()]:
            watcher[place](made)  # type: ignore[operator]
        return made

    return telling


# transformers: what an error means, the report on a loading, weights that stay float32, a tokenizer's serialisation,
# Whisper's languages


def asks_for_own_code(error: Exception) -> bool:
    """Whether a checkpoint was refused because it brings Python code that was not allowed to run."""
    return "trust_remote_code" in str(error)


def is_unknown_type(error: Exception) -> bool:
    """Whether a checkpoint was refused because this transformers has no model of its type."""
    return "Unrecognized model" in str(error) or "does not recognize this architecture" in str(error)


def lacks_tensor_plan(error: Exception) -> bool:
    """Whether a model was refused because transformers has no plan to spread it over processes."""
    return "has no `tp_plan`" in str(error)


def loading_report(report: dict[str, Any]) -> tuple[list[str], list[tuple[Any, ...]], list[str]]:
    """Of the report that from_pretrained gives: missing weights, those of another shape with the file's shape and the
    model's, and those without a place in the model. Sorted."""
    names = ("missing_keys", "mismatched_keys", "unexpected_keys")
    gone = next((name for name in names if name not in report), None)
    if gone is not None:
        raise moved("transformers", f"{gone} in the loading report")
    missing, mismatched, unexpected = (sorted(report[name]) for name in names)
    return missing, mismatched, unexpected


def kept_in_float32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Tells by their names the weights of a transformers model that stay float32 where `dtype` is asked for."""
    if not hasattr(model, "_get_dtype_plan"):
        raise moved("transformers", "PreTrainedModel._get_dtype_plan")
    patterns = [re.compile(pattern.replace("*", ".*")) for pattern in model._get_dtype_plan(dtype)]
    return lambda name: any(pattern.search(name) for pattern in patterns)


def tokenizer_rules(backend: Any) -> str:
    """The serialisation of a fast tokenizer without truncation and padding, which every call of it sets: they stand
    before the added tokens."""
    before, key, rules = str(backend.to_str()).partition('"added_tokens":')
    if not key or '"truncation":' not in before or '"padding":' not in before:
        raise moved("tokenizers", "added_tokens after truncation and padding in a serialised tokenizer")
    return rules


def language_codes() -> dict[str, str]:
    """Whisper's codes of languages, by their English names."""
    try:
        from transformers.models.whisper.tokenization_whisper import TO_LANGUAGE_CODE
    except ImportError:
        raise moved("transformers", "models.whisper.tokenization_whisper.TO_LANGUAGE_CODE") from None
    return dict(TO_LANGUAGE_CODE)


# peft: configurations, the names of an adapter's weights, what an error means


def adapter_config(settings: dict[str, Any]) -> Any:
    """peft's configuration of the content of adapter_config.json, without settings that this version does not know."""
    from peft import PeftConfig

    for name in ("check_kwargs", "from_peft_type"):
        if not hasattr(PeftConfig, name):
            raise moved("peft", f"PeftConfig.{name}")
    return PeftConfig.from_peft_type(**PeftConfig.check_kwargs(**settings))


def puts_tokens_before(config: Any) -> bool:
    """Whether an adapter of this configuration puts tokens of its own before the text."""
    if not hasattr(config, "is_prompt_learning"):
        raise moved("peft", "PeftConfig.is_prompt_learning")
    return bool(config.is_prompt_learning or getattr(config, "is_adaption_prompt", False))


def marks_of_adapter(adapted: Any) -> tuple[str, str]:
    """Parts of the names of weights that belong to the adapter of a model that peft has adapted."""
    from peft.utils import other

    if not isinstance(getattr(adapted.base_model, "prefix", None), str):
        raise moved("peft", "BaseTuner.prefix")
    if not hasattr(other, "ModulesToSaveWrapper"):
        raise moved("peft", "utils.other.ModulesToSaveWrapper")
    return adapted.base_model.prefix, "modules_to_save"


def unsuitable_class(error: Exception) -> str | None:
    """The class of the module that peft cannot adapt; None for another error."""
    match = re.match(r"Target module (\w+)\(", str(error))
    return match and match[1]


def misshapen(error: Exception) -> str | None:
    """The line on the first weight of another shape, of which torch writes a line each; None for another error."""
    lines = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if "size mismatch" in line or "shape" in line), None)


# compressed-tensors: weights that its first pass unpacks


def unpack(model: nn.Module) -> None:
    """Lets compressed-tensors unpack a model's weights. It would do so in a hook of the outermost module, which a pass
    of the base model alone never calls."""
    hook = getattr(model, "ct_decompress_hook", None)
    if hook is None:
        return
    if getattr(hook, "id", None) not in model._forward_pre_hooks:
        raise moved("compressed-tensors", "the model's ct_decompress_hook")
    model._forward_pre_hooks[hook.id](model, ())


# safetensors: why a file could not be written


def why_not_written(error: Exception) -> str:
    """The system's words for why a file could not be written; safetensors puts them between its own."""
    told = re.search(r"I/O error: (.+) \(os error \d+\)", str(error))
    return told[1] if told else getattr(error, "strerror", None) or first_line(error)


# FSDP and DeepSpeed: weights that are spread over processes

SHARDED = ("FullyShardedDataParallel", "FSDPModule")
"""Classes of torch.distributed.fsdp whose weights are spread, by its first and second interface. They are told by their
names: importing them takes long."""


def is_fsdp(module: nn.Module) -> bool:
    """Whether FSDP has spread the weights of this module (FullyShardedDataParallel or fully_shard)."""
    return any(kind.__name__ in SHARDED for kind in type(module).__mro__)


def is_zero3(parameter: nn.Parameter) -> bool:
    """Whether DeepSpeed's ZeRO-3 has spread this parameter: it gives each one a number."""
    return hasattr(parameter, "ds_id")
