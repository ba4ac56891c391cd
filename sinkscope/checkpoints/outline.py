"""A model from its configuration alone: every weight has its shape and no number, so that any size fits anywhere.

Of a hub id config.json is downloaded and nothing else; a folder needs no weights.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sinkscope.capture.private_doors import base_class
from sinkscope.checkpoints.checkpoint import Checkpoint
from sinkscope.checkpoints.checks import Bounds, need_causal
from sinkscope.checkpoints.classes import unwrapped, with_head
from sinkscope.checkpoints.examples import find_example, packed, ready
from sinkscope.checkpoints.loading import FAMILIES, implementation, pick_dtype
from sinkscope.checkpoints.quiet import quiet_transformers, silent
from sinkscope.checkpoints.sources import LoadOptions, Source, check_gguf, path_of
from sinkscope.checkpoints.tokenizers import why_not_loaded
from sinkscope.checkpoints.weight_files import check_counts, read_json
from sinkscope.errors import SinkscopeError

MOST_TENSORS, MOST_NUMBERS = 400_000, 10**14
"""Tensors of an outline, and numbers in them: more takes minutes to make, and no model has as many."""


@dataclass
class Outline(Checkpoint):
    """A checkpoint whose model has no numbers.

    Attributes:
        facts: the id, the revision, the dtype, and `weight_bytes`, the size of the weight files (None where unknown).
        notes: what the configuration does not tell.
    """

    notes: list[str] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """The CPU, where the positions of an outline's inputs have their numbers."""
        return torch.device("cpu")


@dataclass(frozen=True)
class _Found:
    folder: Path
    gguf: str | None = None
    commit: str | None = None
    weight_bytes: int | None = None
    warning: str | None = None


def outlined(name: str, options: LoadOptions) -> Outline:
    """The outline of a MODEL argument: its base model, or with `options.head` the causal language model.

    Raises SinkscopeError, in one line, for a name that leads to no configuration, or to one that no model is made of.
    """
    with quiet_transformers(bars_too=True), _found(name, options.revision) as place:
        config = _configuration(name, place, options)
        if options.head:
            need_causal(name, getattr(config, "architectures", None) or [], config)
        dtype, notes = _dtype(config, options, place.gguf is not None)
        model = _made(name, config, options, dtype)
    facts = {"id": name, "revision": place.commit, "weight_bytes": place.weight_bytes, "dtype": _short(dtype)}
    outline = Outline(name, model, None, facts, "only the configuration was read", notes=notes)
    outline.warnings += [place.warning] if place.warning else []
    return outline


def outline_of(model: nn.Module, head: bool) -> Outline:
    """The outline of a model object: a second model of its configuration. Its dtype is that of the model's weights."""
    config: Any = getattr(model, "config", None)
    if config is None:
        raise SinkscopeError(f"a transformers model or a name is needed, not {type(model).__name__}")
    if head:
        need_causal(type(model).__name__, [type(model).__name__], config)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    name = getattr(config, "name_or_path", None) or type(model).__name__
    with quiet_transformers():
        made = _made(name, config, LoadOptions(head=head), dtype)
    return Outline(name, made, None, {"id": name, "revision": None, "weight_bytes": None, "dtype": _short(dtype)})


@contextmanager
def _found(name: str, revision: str | None) -> Iterator[_Found]:
    """Where the configuration of a model is, as long as the block lasts."""
    path = path_of(name)
    if not name.strip():
        raise SinkscopeError("no such model: the name is empty")
    if revision is not None and (name.startswith("example:") or path.exists()):
        raise SinkscopeError(f"--revision {revision!r} is for hub ids; {name} is on this machine")
    if name.startswith("example:"):
        with _of_example(name.removeprefix("example:")) as place:
            yield place
    elif path.suffix == ".gguf" or path.is_file():
        check_gguf(name, path)
        yield _Found(path.parent.resolve(), path.name, weight_bytes=path.stat().st_size)
    elif path.is_dir():
        yield _of_folder(name, path)
    elif name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SinkscopeError(f"no such model folder: {name}")
    else:
        from sinkscope.checkpoints.hub import config_on_hub

        hub = config_on_hub(name, revision)
        yield _Found(hub.path.parent, None, hub.commit, hub.weight_bytes, hub.warning)


@contextmanager
def _of_example(name: str) -> Iterator[_Found]:
    """An example that is still to be converted is not: its packed file is joined in a folder that goes again."""
    example = find_example(name)
    if ready(name):
        yield _of_folder(f"example:{name}", example.prepare(silent))
        return
    with tempfile.TemporaryDirectory() as folder:
        file = packed(Path(folder))
        yield _Found(file.parent, file.name)


def _of_folder(name: str, path: Path) -> _Found:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; name its file {path / ggufs[0]}" if ggufs else ""
        raise SinkscopeError(f"{name} holds no config.json: not a model folder{hint}")
    sizes = [file.stat().st_size for file in path.glob("*.safetensors") if file.is_file()]
    return _Found(path, weight_bytes=sum(sizes) or None)


def _configuration(name: str, found: _Found, options: LoadOptions) -> Any:
    from transformers import AutoConfig

    for register in FAMILIES.values():
        register()
    if found.gguf is None:
        check_counts(name, read_json(found.folder / "config.json"))
    extra = {"gguf_file": found.gguf} if found.gguf else {}
    with _in_one_line(name, found):
        return AutoConfig.from_pretrained(
            found.folder, trust_remote_code=options.trust_remote_code, local_files_only=True, **extra
        )


def _dtype(config: Any, options: LoadOptions, gguf: bool) -> tuple[torch.dtype, list[str]]:
    """The dtype that a scan loads the weights in, and what of that is a guess."""
    dtype = pick_dtype(options.dtype)
    notes = []
    if getattr(config, "quantization_config", None) is not None and not gguf:
        notes.append(
            "the weights are quantised: they are counted in the dtype that they would have otherwise, which is more"
        )
    if isinstance(dtype, torch.dtype):
        return dtype, notes
    config_dtype = None if gguf else getattr(config, "dtype", None) or getattr(config.get_text_config(), "dtype", None)
    if config_dtype is None and not gguf:
        notes.append("the configuration names no dtype: float32 is assumed, and the weights may have another")
    return config_dtype if isinstance(config_dtype, torch.dtype) else torch.float32, notes


def _made(name: str, config: Any, options: LoadOptions, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModel

    family = with_head(config) if options.head else AutoModel
    if not options.head and not options.trust_remote_code and base_class(config) is None:
        raise SinkscopeError(
            f"{name}: transformers' AutoModel makes no model of its {type(config).__name__}, so its operations cannot "
            "be counted before it is loaded: leave out --dry-run"
        )
    with _in_one_line(name, None), _Bounds(name), torch.device("meta"):
        model = family.from_config(
            config, dtype=dtype, attn_implementation=implementation(config),
            trust_remote_code=options.trust_remote_code,
        )  # fmt: skip
    model.eval()
    return model if options.head else unwrapped(model)


@contextmanager
def _in_one_line(name: str, found: _Found | None) -> Iterator[None]:
    """Turns whatever transformers raises for a configuration into one line."""
    try:
        yield
    except SinkscopeError:
        raise
    except Exception as error:  # any defect of a configuration
        source = Source(name, name if found is None else str(found.folder))
        raise SinkscopeError(why_not_loaded(source, error)) from error


class _Bounds(Bounds):
    """Ends the making of an outline that no model could be."""

    def __init__(self, name: str) -> None:
        super().__init__(Source(name, name))
        self._most = (MOST_TENSORS, MOST_NUMBERS)

    def _refusal(self) -> str:
        return f"{self._source.name}: its config.json describes a model of more than any has: it is damaged"


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
