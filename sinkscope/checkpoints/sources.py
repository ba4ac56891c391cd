"""Finds and checks what a MODEL argument names, and its loading options, before torch or any weights are loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinkscope.checkpoints.examples import example_folder, find_example
from sinkscope.checkpoints.quiet import Report, silent
from sinkscope.checkpoints.weight_files import DISTRIBUTED, SAFE, check_file, damaged, weight_names
from sinkscope.errors import SinkscopeError, did_you_mean, first_line, shorten

if TYPE_CHECKING:
    from sinkscope.checkpoints.hub import Listing


PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True)
class Source:
    """Where to load from. `location` is a folder or hub id; `revision` a commit hash for hub ids, else None."""

    name: str
    location: str
    gguf: str | None = None
    revision: str | None = None
    pickled: bool = False
    weights: tuple[str, ...] = ()
    """Names of the files that hold the weights, sorted."""
    listing: Listing | None = None
    """What the hub says of the commit, where it was asked; its files are still to be fetched."""
    warning: str | None = None

    @property
    def folder(self) -> Path | None:
        """The local folder of the model; None where it is no folder."""
        path = Path(self.location)
        return path if path.is_dir() else None

    def fetched(self, report: Report) -> Source:
        """The source once all its files are on this machine. Raises SinkscopeError where the hub does not give them."""
        if self.listing is not None:
            from sinkscope.checkpoints.hub import fetch

            fetch(self.listing, self.weights, report)
        return self

    def arguments(self, trust_remote_code: bool) -> dict[str, Any]:
        """Arguments of from_pretrained beside the location: one commit, from the cache, which holds all of it.

        Code that a checkpoint brings may need other repositories too: it is loaded with the hub, if that is in reach.
        """
        common: dict[str, Any] = {"trust_remote_code": trust_remote_code}
        if self.revision is not None:
            common["revision"] = self.revision
            common["local_files_only"] = self.listing is None or not trust_remote_code
        return common


def find_source(
    name: str, revision: str | None = None, allow_pickle: bool = False, report: Report = silent
) -> Source:  # fmt: skip
    """Reads a MODEL argument: example:NAME, a .gguf file, a folder, else a hub id (resolved to one commit).

    An example that is converted on first use `report`s how far it is.

    Raises SinkscopeError: no such file, folder without config or weights, damaged files, pickled weights without
    `allow_pickle`, unknown or gated id, unknown revision, hub unreachable.
    """
    if not name.strip():
        raise SinkscopeError("no such model: the name is empty")
    path = path_of(name)
    if revision is not None and (name.startswith("example:") or path.exists()):
        raise SinkscopeError(f"--revision {revision!r} is for hub ids; {name} is on this machine")
    if name.startswith("example:"):
        return _folder(name, example_folder(name.removeprefix("example:"), report), allow_pickle)
    if path.suffix == ".gguf" or path.is_file():
        return _gguf_file(name, path)
    if path.is_dir():
        return _folder(name, path, allow_pickle)
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise SinkscopeError(f"no such model folder: {name}")
    return _hub(name, revision, allow_pickle)


def path_of(name: str) -> Path:
    """The path that a name may be. Raises SinkscopeError where no path can have that name."""
    try:
        path = Path(name).expanduser()
        path.exists()
    except RuntimeError:  # ~USER where there is no such user
        raise SinkscopeError(f"no such model folder: {name}") from None
    except OSError as error:  # too long
        raise SinkscopeError(f"no such model: {shorten(name)} ({error.strerror})") from None
    return path


def check_gguf(name: str, path: Path) -> None:
    """Raises SinkscopeError where a path is no .gguf file, or one that is damaged."""
    if not path.is_file():
        raise SinkscopeError(f"no such file: {name}")
    if path.suffix != ".gguf":
        raise SinkscopeError(f"{name} is a file: give its folder, or a .gguf file")
    check_file(path)
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        blocks = max(_numbers(reader, ".block_count"), default=0)
    except Exception as error:  # damage raises struct, numpy, Unicode or key errors in the reader
        raise SinkscopeError(f"{name} is damaged or not a GGUF file ({first_line(error)}): download it again") from None
    if blocks > len(reader.tensors):
        raise SinkscopeError(
            f"{name} is damaged: its metadata say {blocks} blocks, and it holds {len(reader.tensors)} tensors"
        )


def _gguf_file(name: str, path: Path) -> Source:
    check_gguf(name, path)
    return Source(name, str(path.parent.resolve()), gguf=path.name, weights=(path.name,))


def _numbers(reader: Any, ending: str) -> list[int]:
    """The numbers among a GGUF's metadata whose names end so."""
    return [int(field.parts[field.data[0]][0]) for name, field in reader.fields.items() if name.endswith(ending)]


def _folder(name: str, path: Path, allow_pickle: bool) -> Source:
    config = path / "config.json"
    if not config.is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"; name its file {path / ggufs[0]}" if ggufs else ""
        raise SinkscopeError(f"{name} holds no config.json: not a model folder{hint}")
    files = sorted(file.name for file in path.iterdir())
    weights = weight_names(name, files, path.joinpath)
    if any(DISTRIBUTED.fullmatch(file) for file in files):
        weights = tuple(file for file in files if file.endswith(".safetensors"))
    for file in weights:
        check_file(path / file)
    if _safe(weights):
        for file in weights:
            _check_safetensors(path / file)
        return Source(name, str(path), weights=weights)
    if not _pickles(path):
        raise SinkscopeError(f"{name} holds no weights ({SAFE})")
    _require_allow_pickle(name, allow_pickle)
    return Source(name, str(path), pickled=True, weights=weights)


def _safe(weights: tuple[str, ...]) -> bool:
    return bool(weights) and weights[0].endswith(".safetensors")


def _pickles(path: Path) -> list[Path]:
    return [file for pattern in PICKLED for file in path.glob(pattern)]


def _require_allow_pickle(name: str, allow_pickle: bool) -> None:
    if not allow_pickle:
        raise SinkscopeError(
            f"{name} has pickled weights only, which can run code when opened: pass --allow-pickle if you trust it, "
            "or convert it to safetensors"
        )


def _check_safetensors(file: Path) -> None:
    """Opens the file: its header gives the length, so a truncated download is found at once. Raises SinkscopeError."""
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt"):
            pass
    except Exception as error:  # whatever it is: nothing can be read of the file
        raise damaged(file, error) from None


def _hub(name: str, revision: str | None, allow_pickle: bool) -> Source:
    from sinkscope.checkpoints.hub import find_on_hub

    hub_model = find_on_hub(name, revision)
    pickled = not _safe(hub_model.weights)
    if pickled:
        _require_allow_pickle(name, allow_pickle)
    return Source(
        name, name, revision=hub_model.commit, pickled=pickled, weights=hub_model.weights, listing=hub_model.listing,
        warning=hub_model.warning,
    )  # fmt: skip


def weight_paths(source: Source, extra: tuple[str, ...] = ()) -> list[Path]:
    """Paths of the weight files; for a hub id those in the cache, once it is loaded. `extra`: names that may exist."""
    folder = source.folder
    if folder is None:
        from huggingface_hub import hf_hub_download

        config = hf_hub_download(source.location, "config.json", revision=source.revision, local_files_only=True)
        folder = Path(config).parent
    more = {file for file in extra if (folder / file).is_file()}
    return [folder / file for file in sorted({*source.weights} | more)]


# What a model's name and its loading options may be: checked without torch, so that a slip is refused at once.


DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that a model may be loaded in, as torch calls them."""


@dataclass(frozen=True)
class LoadOptions:
    """How to load; the names and defaults are the command line's.

    Attributes:
        device_map: `auto`, or accelerate's map of module paths to devices (`cpu`, `disk`, a GPU's number).
        head: load the language-model head too.
        tensor_parallel: processes that the heads are spread over.
        adapter: folder of a PEFT adapter that is put into the model.
        hash_later: leave the weights' hash to a thread, until `Checkpoint.settle` waits for it. With an adapter it is
            made at once.
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
    hash_later: bool = False


def _refuse_slip(name: str) -> None:
    """Raises SinkscopeError for a name that is nearly that of a model's or a run's folder beside it, or of a run's if
    the name has a slash: the hub would be asked for long before it said no."""
    path = Path(name)
    telling = ("manifest.json",) if "/" in name else ("manifest.json", "config.json")  # OWNER/NAME is as the hub has it
    try:
        folders = [folder for folder in path.parent.iterdir() if any((folder / file).is_file() for file in telling)]
    except OSError:
        return
    beside = [f"{path.parent}/{folder.name}" if "/" in name else folder.name for folder in folders]
    near = did_you_mean(str(path), beside) if path.name else ""
    if near:
        raise SinkscopeError(f"no folder {name!r}{near} A model of the hub is named with its owner, OWNER/NAME")


def check_dtype(name: str) -> None:
    """Raises SinkscopeError for a dtype that no model is loaded in."""
    if name != "auto" and name not in DTYPES:
        raise SinkscopeError(f"unknown dtype {name!r}: use auto, {', '.join(DTYPES)}{did_you_mean(name, DTYPES)}")


def check_model(name: str, revision: str | None = None, allow_pickle: bool = False) -> None:
    """Raises SinkscopeError for a model that cannot be found: an unknown example, an absent folder, no such hub id.

    Opens no file of the model: that is for loading. A hub id is asked for at the hub, or looked up in its cache.
    """
    if name.startswith("example:"):
        find_example(name.removeprefix("example:"))
        return
    if not name.strip() or not path_of(name).exists():
        _refuse_slip(name)
        find_source(name, revision, allow_pickle)
