"""Reads the folder of a PEFT adapter and refuses what could run code, name other files, or cannot be measured."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sinkscope.checkpoints.weight_files import check_file, read_json, sha256_of_file
from sinkscope.errors import SinkscopeError, did_you_mean

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLED = "adapter_model.bin"

NAMES_A_FILE = re.compile(r"(^|_)(path|file|folder|dir|directory)$")
"""Names of settings by which peft opens a file of the adapter's choice."""

BASE = "base_model_name_or_path"

RANKS = {"r", "rank", "init_r", "target_r", "rank_pattern"}
MOST_RANK = 2**16
"""The largest rank: no layer is that wide, and peft fills matrices of the rank before it looks at the file."""

DEEPEST = 100
"""How deeply settings may be nested."""

CHANGES_THE_BASE = ("pissa_niter", "corda", "loftq", "lora_ga", "mica")
"""Starts of `init_lora_weights` by which the training changed the base's weights too, in a way that cannot be repeated
exactly: by a random factorisation, from data, or by rounding."""

NOT_MEASURED = {
    "XLORA": "it mixes several adapters of other folders anew for each text",
    "POLY": "it mixes its weights by a task that each text would have to name",
    "SHADOW": "it adds a second network beside the model, which attends by itself",
}


def _is_rank(value: Any) -> bool:
    return type(value) is int and value >= 1


def _is_place(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_flag(value: Any) -> bool:
    return isinstance(value, bool)


def _is_pattern(value: Any) -> bool:
    try:
        re.compile(value)
    except (re.error, TypeError, RecursionError):
        return False
    return isinstance(value, str)


def _all(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(test, value))


def _by_name(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(_is_pattern, value)) and all(map(test, value.values()))


def _either(*tests: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: any(test(value) for test in tests)


FORMS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("r init_r target_r", _is_rank, "a whole number from 1 on"),
    ("rank_pattern", _by_name(_is_rank), "a whole number from 1 on for each name"),
    ("lora_alpha", _is_number, "a number"),
    ("alpha_pattern", _by_name(_is_number), "a number for each name"),
    ("target_modules exclude_modules", _either(_is_pattern, _all(_is_pattern)), "a pattern or a list of names"),
    ("layers_pattern", _either(_is_pattern, _all(_is_pattern)), "a name or a list of names"),
    ("modules_to_save target_parameters", _all(_is_pattern), "a list of names"),
    ("trainable_token_indices", _either(_all(_is_place), _by_name(_all(_is_place))), "a list of token ids"),
    ("layers_to_transform", _either(_is_place, _all(_is_place)), "a list of layers"),
    ("lora_dropout", _is_share, "a number from 0 to 1"),
    ("use_rslora use_dora fan_in_fan_out lora_bias", _is_flag, "true or false"),
)  # fmt: skip
"""Settings by name, what they must be where they are not null, and the words for it. peft fails anyhow on others."""

NEVER_NULL = {"LORA": ("r", "lora_alpha")}
"""Settings that each kind of adapter needs."""


@dataclass(frozen=True)
class AdapterFolder:
    """A PEFT adapter on disk.

    Attributes:
        name: the folder as it was given.
        path: the folder.
        settings: the content of adapter_config.json.
        files: SHA-256 of each of its two files, by name.
    """

    name: str
    path: Path
    settings: dict[str, Any]
    files: dict[str, str]

    @property
    def kind(self) -> str:
        """PEFT's name of the method, such as LORA."""
        return str(self.settings["peft_type"])

    @property
    def base(self) -> str | None:
        """The model that it was trained on, as its training named it."""
        base = self.settings.get(BASE)
        return base if isinstance(base, str) and base else None

    def joined_hash(self, base: str | None) -> str:
        """SHA-256 over the hash of the base's weights and those of the adapter's files."""
        digest = hashlib.sha256(f"{base}\n".encode())
        for name, file_hash in sorted(self.files.items()):
            digest.update(f"{name}:{file_hash}\n".encode())
        return digest.hexdigest()

    @property
    def weights(self) -> Path:
        """The file of its weights."""
        return self.path / WEIGHTS

    @property
    def paths(self) -> list[Path]:
        """The files that are read: configuration and weights."""
        return [self.path / CONFIG, self.weights]


def find_adapter(name: str) -> AdapterFolder:
    """Reads the folder of an adapter, without its weights.

    Raises SinkscopeError: peft is not installed; no such folder, or not an adapter's; pickled weights; files outside
    the folder; damaged files; settings that could run code or open other files; a kind that cannot be measured.
    """
    if find_spec("peft") is None:
        raise SinkscopeError("--adapter needs the package peft: pip install 'sinkscope[adapters]'")
    path = _folder(name)
    for file in (CONFIG, WEIGHTS):
        check_file(path / file)
        _check_place(path, path / file)
    settings = read_json(path / CONFIG)
    if not isinstance(settings, dict) or not isinstance(settings.get("peft_type"), str):
        raise SinkscopeError(f"{path / CONFIG} is damaged: it names no peft_type")
    _check_settings(name, settings)
    return AdapterFolder(name, path, settings, {file: sha256_of_file(path / file) for file in (CONFIG, WEIGHTS)})


def _folder(name: str) -> Path:
    """The folder of that name. Raises SinkscopeError where it is none, or lacks one of an adapter's two files."""
    try:
        path = Path(name).expanduser()
        held = {file.name for file in path.iterdir()}
    except (OSError, ValueError, RuntimeError) as error:  # no such folder or user; no permission; a null character
        reason = getattr(error, "strerror", None) or error
        raise SinkscopeError(f"no such adapter folder: {name} ({reason}); download a hub adapter first") from None
    if CONFIG not in held:
        raise SinkscopeError(f"{name} holds no {CONFIG}: it is not the folder of a PEFT adapter")
    if WEIGHTS not in held:
        raise SinkscopeError(
            f"{name} has pickled weights only, which can run code when opened: load it with peft and save it again"
            if PICKLED in held
            else f"{name} holds no {WEIGHTS}: save the adapter again with save_pretrained"
        )
    return path


def _check_place(folder: Path, file: Path) -> None:
    """Raises SinkscopeError for a link out of the folder; the hub's cache has links from snapshots to blobs."""
    content, home = file.resolve(), folder.resolve()
    if content.parent != home and content.parent != home.parent.parent / "blobs":
        raise SinkscopeError(f"{file} is a link to {content}, outside the adapter's folder: put the file itself there")


def _check_settings(name: str, settings: dict[str, Any]) -> None:
    """Raises SinkscopeError for settings by which peft would import a module, open a file or change the layers."""
    for key, value in _named(name, settings):
        if key in RANKS and any(rank > MOST_RANK for rank in _numbers(value)):
            raise SinkscopeError(
                f"{name}: {CONFIG} asks for a rank above {MOST_RANK}: it is damaged, download it again"
            )
        if NAMES_A_FILE.search(key) and key != BASE and value is not None:
            raise SinkscopeError(
                f"{name}: {CONFIG} names a file of its own ({key}: {str(value)[:80]!r}), which is not read: remove it"
            )
    if settings.get("megatron_config") is not None:
        raise SinkscopeError(f"{name}: {CONFIG} has peft import Megatron's code (megatron_config): merge the adapter")
    if settings.get("layer_replication") is not None:
        raise SinkscopeError(f"{name} repeats layers of its base (layer_replication): merge it and measure that model")
    if settings.get("alora_invocation_tokens"):
        raise SinkscopeError(f"{name} starts at a token of the text (aLoRA), which sinkscope does not measure")
    start = settings.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(CHANGES_THE_BASE):
        raise SinkscopeError(
            f"{name} also changed its base model's weights when it was initialised (init_lora_weights {start}), and "
            "its files do not store that change: convert it to plain LoRA (peft's save_pretrained, "
            "path_initial_model_for_weight_conversion), or merge it"
        )
    _check_kind(name, settings["peft_type"])
    for keys, fits, words in FORMS:
        for key in keys.split():
            value = settings.get(key)
            none = key == "r" and value == 0 and settings.get("oft_block_size")  # its blocks say the rank instead
            null = value is None and (key not in settings or key not in NEVER_NULL.get(settings["peft_type"], ()))
            if not null and not none and not fits(value):
                shown = "null" if value is None else repr(value)[:80]
                raise SinkscopeError(
                    f"{name}: {CONFIG} says {key} {shown}, where {words} is needed: it is damaged, download it again"
                )


def _check_kind(name: str, kind: str) -> None:
    """Raises SinkscopeError for a kind of adapter that the installed peft does not know, or that cannot be measured."""
    from peft import PeftType

    kinds = [member.value for member in PeftType]
    if kind not in kinds:
        raise SinkscopeError(
            f"{name}: {CONFIG} names the kind {kind[:80]!r}, which peft {version('peft')} does not have: update peft, "
            f"or download the adapter again{did_you_mean(kind, kinds)}"
        )
    reason = NOT_MEASURED.get(kind)
    if reason is not None:
        raise SinkscopeError(f"{name} is a PEFT adapter of kind {kind}: {reason}; it is not measured")


def _named(name: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Every setting with its name, at any depth. Raises SinkscopeError where they are nested too deeply."""
    rest: list[tuple[Any, int]] = [(settings, 0)]
    while rest:
        value, depth = rest.pop()
        if depth > DEEPEST:
            raise SinkscopeError(f"{name}: {CONFIG} is damaged: its values are nested too deeply")
        if isinstance(value, dict):
            yield from ((str(key), inner) for key, inner in value.items())
        if isinstance(value, dict | list):
            rest += [(inner, depth + 1) for inner in (value.values() if isinstance(value, dict) else value)]


def _numbers(value: Any) -> list[int | float]:
    """A number, or those that a dictionary holds by name."""
    values = list(value.values()) if isinstance(value, dict) else [value]
    return [number for number in values if isinstance(number, int | float)]
