"""Puts a PEFT adapter into a loaded model: its layers then compute what base and adapter give together."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any
from warnings import catch_warnings, simplefilter

import torch
from torch import Tensor, nn

from sinkscope.checkpoints.adapter_files import CONFIG, WEIGHTS, AdapterFolder, find_adapter
from sinkscope.checkpoints.checks import Bounds
from sinkscope.checkpoints.private_doors import (
    adapter_config,
    marks_of_adapter,
    misshapen,
    puts_tokens_before,
    unsuitable_class,
)
from sinkscope.checkpoints.sources import Source
from sinkscope.errors import SinkscopeError, first_line

SAVED = "base_model.model."
"""Start of a name in an adapter's file; what follows is the name in the model that was trained. Weights that all layers
of an adapter share have names of their own."""


class _Whole(nn.Module):
    """Stands for the model with its head, whose names an adapter uses, though only the base model is loaded."""

    def __init__(self, base: nn.Module, name: str) -> None:
        super().__init__()
        self.config: Any = base.config
        self.add_module(name, base)


class _AdapterBounds(Bounds):
    """While the context lasts, what this thread adds to a model must not be far larger than the adapter's file: a
    config of some hundred bytes can ask for a rank of 10^12."""

    def __init__(self, folder: AdapterFolder) -> None:
        super().__init__(Source(folder.name, str(folder.path)))
        self._every = True
        self._weights = folder.weights

    def _files(self) -> list[Path]:
        return [self._weights]

    def _refusal(self) -> str:
        return (
            f"{self._source.name}: its {CONFIG} describes an adapter far larger than its weights: the two do not belong"
            " together; download it again"
        )


def adapter_asked(name: str | None, spread: bool) -> AdapterFolder | None:
    """The adapter in a folder; None where none is asked for. `spread`: the model is to lie on several devices.

    Raises SinkscopeError as `find_adapter` does, and where the model is to be spread.
    """
    if name is not None and spread:
        raise SinkscopeError(
            "--adapter needs the model on one device: leave out --device-map and --tp, or merge the adapter"
        )
    return None if name is None else find_adapter(name)


def adapted(name: str, model: nn.Module, folder: AdapterFolder, facts: dict[str, Any]) -> list[str]:
    """Puts the adapter into the model and what it is into the model's facts. Returns and raises as `add_adapter`."""
    warnings = add_adapter(name, model, folder)
    base = facts["weights_sha256"]
    facts["adapter"] = {
        "path": folder.name, "kind": folder.kind, "base": folder.base, "files": folder.files,
        "base_weights_sha256": base,
    }  # fmt: skip
    facts["weights_sha256"] = folder.joined_hash(base)
    return warnings


def add_adapter(name: str, model: nn.Module, folder: AdapterFolder) -> list[str]:
    """Puts the adapter into the base model, which keeps its own weights, and returns warnings. `name`: the MODEL.

    Nothing is merged. What the adapter changes in a language-model or classifier head is left out: no attention reads
    it. Raises SinkscopeError where peft cannot read the adapter, where it puts tokens of its own before the text, or
    where its weights do not fit the model.
    """
    saved = _saved_weights(folder)
    prefix = str(getattr(model, "base_model_prefix", "") or "")
    inside = f"{SAVED}{prefix}."
    headed = bool(prefix) and not hasattr(model, prefix) and any(key.startswith(inside) for key in saved)
    whole: nn.Module = _Whole(model, prefix) if headed else model
    heads = sorted(key for key in saved if headed and key.startswith(SAVED) and not key.startswith(inside))
    fitting = {key: weight for key, weight in saved.items() if key not in heads}
    with catch_warnings():
        simplefilter("ignore")  # peft's own, on settings that its versions add and on names; checked below
        _filled(name, _injected(name, whole, folder), folder, fitting)
    head = heads[0].removeprefix(SAVED).partition(".")[0] if heads else ""
    told = [f"the adapter also changes {head}, which is not measured: no attention reads it"] if heads else []
    return told + _other_base(name, folder)


def _saved_weights(folder: AdapterFolder) -> dict[str, Tensor]:
    """The adapter's tensors by name. Raises SinkscopeError for a damaged file."""
    from safetensors.torch import load_file

    try:
        weights = load_file(folder.weights)
    except Exception as error:  # whatever it is: nothing can be read of the file
        raise SinkscopeError(f"{folder.weights} is damaged or truncated ({first_line(error)}): save it again") from None
    coded = next((key for key, weight in weights.items() if weight.is_floating_point() and weight.itemsize < 2), None)
    if coded is not None:
        kind = str(weights[coded].dtype).removeprefix("torch.")
        raise SinkscopeError(
            f"{folder.name}: the weights {coded} are stored as {kind}, and nothing says what these codes stand for: "
            "save the adapter again in float32, bfloat16 or float16"
        )
    bad = next((key for key, weight in weights.items() if weight.is_floating_point() and not _finite(weight)), None)
    if bad is not None:
        raise SinkscopeError(f"{folder.name}: the weights {bad} hold NaN or infinity; the adapter is damaged")
    if not weights:
        raise SinkscopeError(f"{folder.weights} holds no weights: save the adapter again")
    return weights


def _finite(weight: Tensor) -> bool:
    return bool(torch.isfinite(weight).all())


def _injected(name: str, whole: nn.Module, folder: AdapterFolder) -> Any:
    """The model with the adapter's layers, which hold first numbers yet."""
    from peft import PeftModel

    try:
        config = adapter_config(folder.settings)
        config.inference_mode = True
    except SinkscopeError:
        raise
    except Exception as error:  # an unknown kind, a missing setting, a value of a wrong type
        raise SinkscopeError(
            f"{folder.path / CONFIG} is damaged, or from another version of peft: {_reason(error)}"
        ) from None
    if puts_tokens_before(config):
        raise SinkscopeError(
            f"{folder.name} ({folder.kind}) puts tokens of its own before the text, so the first token is no longer "
            "the first key: alpha_0 and BOS mass would measure another token, so sinkscope does not scan it"
        )
    try:
        with _AdapterBounds(folder):
            return PeftModel(whole, config).eval()
    except SinkscopeError:
        raise
    except Exception as error:  # no such module in the model; a rank of 0; no memory
        raise _misfit(name, folder, _reason(error)) from None


def _filled(name: str, adapted: Any, folder: AdapterFolder, weights: dict[str, Tensor]) -> None:
    """Loads the adapter's tensors. Raises SinkscopeError where one has no place, another shape, or is missing."""
    from peft import set_peft_model_state_dict

    try:
        report = set_peft_model_state_dict(adapted, weights)
    except Exception as error:  # torch names each tensor of another shape on a line of its own
        raise _misfit(name, folder, misshapen(error) or _reason(error)) from None
    if report.unexpected_keys:
        raise _misfit(name, folder, f"{WEIGHTS} holds {sorted(report.unexpected_keys)[0]}, which has no place in it")
    absent = _absent(adapted, set(report.missing_keys))
    if absent:
        raise _misfit(name, folder, f"{WEIGHTS} lacks {absent[0]}")


def _absent(adapted: Any, missing: set[str]) -> list[str]:
    """Names of the adapter's own weights that no tensor of the file has filled, under any of their names."""
    named = {key: weight for key, weight in adapted.state_dict(keep_vars=True).items() if isinstance(weight, Tensor)}
    filled = {id(weight) for key, weight in named.items() if key not in missing}
    marks = marks_of_adapter(adapted)
    return sorted(
        key for key, weight in named.items() if any(part in key for part in marks) and id(weight) not in filled
    )


def _reason(error: Exception) -> str:
    """What peft says of a failure, where it is said for people, else what that failure means."""
    kind = unsuitable_class(error)
    if kind is not None:
        return f"{CONFIG} targets a module of class {kind}, which peft cannot adapt"
    if isinstance(error, KeyError):  # peft looks for a weight by its name
        return f"{WEIGHTS} lacks {error.args[0]}"
    if isinstance(error, IndexError):
        return f"{CONFIG} names a token or a layer that the model does not have"
    if isinstance(error, ValueError | RuntimeError | ImportError):
        return first_line(error)
    return f"peft {version('peft')} can make nothing of a setting in {CONFIG}"


def _misfit(name: str, folder: AdapterFolder, reason: str) -> SinkscopeError:
    return SinkscopeError(f"the adapter {folder.name} does not fit {name}: {reason[:250]}")


def _other_base(name: str, folder: AdapterFolder) -> list[str]:
    """A warning where the adapter was trained on a model of another name."""
    base = folder.base
    if base is None or Path(base).name == Path(name).name:
        return []
    return [f"the adapter {folder.name} was trained on {base}, and is measured on {name}: make sure they are the same"]
