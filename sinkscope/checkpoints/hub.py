"""Models of the hub: a name becomes one commit, whose files come into huggingface_hub's cache before it is loaded.

The model is then loaded from the cache alone, so that a hub that goes down meanwhile is not missed, and a scan without
the hub loads what the scan with it did."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path, PureWindowsPath
from typing import Any
from urllib.parse import quote

from sinkscope.checkpoints.downloads import (
    COMMIT,
    Stalled,
    Transfer,
    cache_of,
    cached_commits,
    download,
    find_snapshot,
    holds,
    remember,
)
from sinkscope.checkpoints.examples import EXAMPLES
from sinkscope.checkpoints.quiet import Report
from sinkscope.checkpoints.weight_files import SAFE, weight_names
from sinkscope.errors import SinkscopeError, did_you_mean, first_line

SETTINGS = re.compile(
    r".*\.(json|txt|model|jinja|py|tiktoken|bpe|spm|codes|vocab|tokenizer|tsv|ya?ml)|.*(token|vocab|merges).*", re.I
)
"""Names of files beside the weights that transformers may read: configurations, tokenizers, processors, code."""
WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|ckpt|h5|msgpack|onnx|onnx_data|gguf|npz|npy|zip|gz|parquet)", re.I)
TEMPLATES = "additional_chat_templates/"
MOST_SETTINGS = 2**28
"""Bytes of the largest of those files; the largest tokenizers have some 40 MB."""

AT_ONCE = 4
"""Files that are downloaded at once."""

HINTS = {
    401: "run `hf auth login`",
    403: "your access does not cover it; see its page, or run `hf auth login`",
    404: "it has nothing of that name",
    429: "too many requests; wait some minutes",
}


@dataclass(frozen=True)
class Listing:
    """What the hub says of one commit: the revision that was asked for, and the size of each file, where told."""

    name: str
    asked: str | None
    commit: str
    sizes: dict[str, int | None]


@dataclass(frozen=True)
class HubModel:
    """A model that was found: its commit, its weight files, and what is still to be fetched, None if nothing is."""

    commit: str
    weights: tuple[str, ...]
    listing: Listing | None = None
    warning: str | None = None


class _OutOfReach(Exception):
    """The hub gives no answer, or one that says nothing of the model; the text says which."""


def find_on_hub(name: str, revision: str | None) -> HubModel:
    """Resolves a hub id to one commit, so that config, weights and tokenizer come from one state of the repository.

    Without the hub, the commit is the one that its cache has for the revision. Raises SinkscopeError for an unknown or
    gated id, an unknown revision, or a hub out of reach of which the cache does not hold the whole model.
    """
    try:
        listing = _ask(name, revision)
    except _OutOfReach as error:
        return _cached(name, revision, str(error))
    weights = _weights(name, set(listing.sizes), lambda file: _settings_file(listing, file))
    return HubModel(listing.commit, weights, listing)


@dataclass(frozen=True)
class HubConfig:
    """The configuration of a model that was found: its commit, the file, and the bytes of the commit's weights, where
    the hub tells them."""

    commit: str
    path: Path
    weight_bytes: int | None = None
    warning: str | None = None


def config_on_hub(name: str, revision: str | None) -> HubConfig:
    """Resolves a hub id as `find_on_hub` does, and downloads its config.json alone.

    Raises SinkscopeError for an unknown or gated id, an unknown revision, a model without a configuration, or a hub out
    of reach where the cache does not hold the file.
    """
    try:
        listing = _ask(name, revision)
    except _OutOfReach as error:
        snapshot = find_snapshot(name, revision)
        if snapshot is None or not (snapshot.folder / "config.json").is_file():
            raise SinkscopeError(f"{error} and the config.json of {name!r} is not in its cache") from None
        return HubConfig(snapshot.commit, snapshot.folder / "config.json", warning=snapshot.warning)
    if "config.json" not in listing.sizes:
        raise SinkscopeError(f"{name} holds no config.json: not a transformers model")
    sizes = [size for file, size in listing.sizes.items() if file.endswith(".safetensors") and "/" not in file]
    told = sum(size for size in sizes if size is not None) if sizes and None not in sizes else None
    return HubConfig(listing.commit, _settings_file(listing, "config.json"), told)


def fetch(listing: Listing, weights: tuple[str, ...], report: Report) -> None:
    """Downloads what the cache lacks of a model, and has the cache remember the name once all is there.

    Raises SinkscopeError for whatever keeps it from that.
    """
    files = [*filter(partial(_wanted, listing), listing.sizes), *weights]
    lacking = [file for file in files if not holds(listing.name, listing.commit, file)]
    sizes = [listing.sizes.get(file) for file in lacking]
    transfer = Transfer(report, 0 if None in sizes else sum(size or 0 for size in sizes))
    transfer.run([partial(_fetch, listing, file, transfer, file in weights) for file in lacking], AT_ONCE)
    for file in weights:
        _check_size(listing, file)
    remember(listing.name, listing.asked, listing.commit)


def _wanted(listing: Listing, file: str) -> bool:
    """Whether transformers may read a file beside the weights. A name that leads elsewhere is none of the model's."""
    plain = file.removeprefix(TEMPLATES) if file.endswith(".jinja") else file
    if (
        PureWindowsPath(plain).name != plain
        or not plain.isprintable()
        or plain.startswith(".")
        or WEIGHTS.fullmatch(plain)
    ):
        return False
    return bool(SETTINGS.fullmatch(plain)) and (listing.sizes[file] or 0) <= MOST_SETTINGS


def _ask(name: str, revision: str | None) -> Listing:
    """Asks the hub for the commit of a revision and its files. Raises SinkscopeError, or _OutOfReach."""
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

    try:
        (info,) = Transfer().run([partial(describe, name, revision)])
    except GatedRepoError:
        raise _gated(name) from None
    except RevisionNotFoundError:
        raise SinkscopeError(f"{name} has no revision {revision!r}") from None
    except RepositoryNotFoundError:
        raise SinkscopeError(
            f"no model {name!r} on the hub, and no such folder (private ones need `hf auth login`)"
            f"{near_hub_names(name)}"
        ) from None
    except HFValidationError:
        raise SinkscopeError(f"{name!r} is neither a folder, a .gguf file nor a hub id{near_hub_names(name)}") from None
    except Stalled as error:
        raise _OutOfReach(str(error)) from None
    except SinkscopeError:
        raise
    except Exception as error:  # every transport error of every HTTP library: offline, DNS, proxy, 5xx
        raise _OutOfReach(_out_of_reach(error)) from None
    if not COMMIT.fullmatch(str(info.sha)):
        raise SinkscopeError(f"the hub names no commit of {name}: it does not answer as a model hub does")
    sizes = {file.rfilename: _size(file) for file in info.siblings or []}
    return Listing(name, revision, str(info.sha), sizes)


def _size(sibling: Any) -> int | None:
    """Bytes of a listed file; None where the hub does not tell them."""
    size = getattr(getattr(sibling, "lfs", None), "size", None) or getattr(sibling, "size", None)
    return size if isinstance(size, int) and size > 0 else None


def _gated(name: str) -> SinkscopeError:
    return SinkscopeError(f"{name} is gated: ask for access on its page, then run `hf auth login`")


def _settings_file(listing: Listing, file: str) -> Path:
    (path,) = (transfer := Transfer()).run([partial(_fetch, listing, file, transfer, False)])
    return Path(path)


def _fetch(listing: Listing, file: str, transfer: Transfer, weights: bool) -> Path:
    """Downloads one file of the listed commit. Raises SinkscopeError, which names the file."""
    from huggingface_hub.errors import GatedRepoError

    try:
        return download(listing.name, file, listing.commit, transfer, None if weights else MOST_SETTINGS)
    except GatedRepoError:
        raise _gated(listing.name) from None
    except SinkscopeError as error:
        raise SinkscopeError(f"cannot download {file} of {listing.name}: {error}") from None
    except Exception as error:  # transport errors, a full disk, a cache that cannot be written
        raise SinkscopeError(f"cannot download {file} of {listing.name}: {reason(error)}") from None


def _check_size(listing: Listing, file: str) -> None:
    """Raises SinkscopeError where the cache holds another number of bytes than the hub: a download that was cut."""
    path, size = cache_of(listing.name) / "snapshots" / listing.commit / file, listing.sizes.get(file)
    if size is not None and path.stat().st_size != size:
        raise SinkscopeError(
            f"{path} has {path.stat().st_size} bytes, and on the hub {size}: delete it and {path.resolve()}, and the "
            "next scan downloads it"
        )


def reason(error: BaseException) -> str:
    """Why the hub gave no file, in one line: its status and what to do, or what the transport says."""
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled

    if isinstance(error, OfflineModeIsEnabled):
        return "offline mode: HF_HUB_OFFLINE is set"
    if isinstance(error, LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is None:
        return first_line(error)
    hint = HINTS.get(status, "try again later" if status >= 500 else "")
    return f"the hub answers {status}" + (f": {hint}" if hint else "")


def _out_of_reach(error: Exception) -> str:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < 500 and status != 404:
        return f"the model hub refuses the request ({reason(error)})"
    return f"the model hub cannot be reached ({reason(error)})"


def _cached(name: str, revision: str | None, why: str) -> HubModel:
    """Finds an earlier download in the cache while the hub is out of reach. Raises SinkscopeError if there is none."""
    commits = cached_commits(name)
    if not commits:
        raise SinkscopeError(f"{why} and {name!r} is neither a folder nor in its cache{near_hub_names(name)}")
    snapshot = find_snapshot(name, revision)
    if snapshot is None:
        wanted = "its main branch" if revision is None else f"{revision!r}"
        held = ", ".join(commits[:3]) + (", ..." if len(commits) > 3 else "")
        raise SinkscopeError(
            f"{why} and the cache of {name} does not say which commit {wanted} is: scan it once with the hub in reach, "
            f"or give --revision with one that the cache holds ({held})"
        )
    files = {file.name for file in snapshot.folder.iterdir() if file.exists()}
    lacking = SinkscopeError(
        f"{why} and the cache holds only a part of {name} at {snapshot.commit}: scan it once with the hub in reach, or "
        f"run `hf download {name}`"
    )
    if "config.json" not in files:
        raise lacking
    weights = weight_names(name, files, snapshot.folder.joinpath)
    if not weights or not files.issuperset(weights):
        raise lacking
    return HubModel(snapshot.commit, weights, warning=snapshot.warning)


def _weights(name: str, files: set[str], path_of: Callable[[str], Any]) -> tuple[str, ...]:
    """The weight files among the files of a repository. Raises SinkscopeError where it holds no model."""
    if "config.json" not in files:
        raise SinkscopeError(f"{name} holds no config.json: not a transformers model")
    weights = weight_names(name, files, path_of)
    if not weights:
        raise SinkscopeError(f"{name} holds no weights ({SAFE})")
    return weights


# What the hub says of a model: its commit and its files. An answer without end is not read to it.


LONGEST = 2**26
"""Bytes of the longest description, unpacked: some 300,000 files."""
SECONDS = 20
"""How long the hub may take for each piece of its answer."""


def describe(name: str, revision: str | None) -> Any:
    """The `ModelInfo` of a model at a revision, with the sizes of its files.

    It is what `HfApi.model_info` returns, which would read an answer of any length into memory. Raises SinkscopeError
    for an answer longer than LONGEST, and what `HfApi.model_info` raises.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.hf_api import ModelInfo
    from huggingface_hub.utils import (  # type: ignore[attr-defined] # public, and not in its list of names
        build_hf_headers,
        get_session,
        hf_raise_for_status,
        validate_repo_id,
    )

    validate_repo_id(name)
    at = "" if revision is None else f"/revision/{quote(revision, safe='')}"
    address = f"{HfApi().endpoint}/api/models/{name}{at}"
    headers = build_hf_headers()
    with get_session().stream("GET", address, params={"blobs": True}, headers=headers, timeout=SECONDS) as answer:
        body = _read(name, answer)
        # With its body in hand, the answer is one that was never streamed: errors quote it.
        plain = {key: value for key, value in answer.headers.items() if key.lower() not in ENCODED}
        whole = type(answer)(answer.status_code, headers=plain, content=body, request=answer.request)
    hf_raise_for_status(whole)
    return ModelInfo(**json.loads(body))


ENCODED = ("content-encoding", "content-length", "transfer-encoding")


def _read(name: str, answer: Any) -> bytes:
    body = bytearray()
    for piece in answer.iter_bytes():
        body += piece
        if len(body) > LONGEST:
            raise SinkscopeError(
                f"the hub's description of {name} is longer than any model's: it was not read to the end"
            )
    return bytes(body)


# Ids of the hub's models that a misspelt name may mean.


WELL_KNOWN = (
    "EleutherAI/pythia-1b", "EleutherAI/pythia-160m", "EleutherAI/pythia-410m", "FacebookAI/roberta-base",
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
    "allenai/OLMo-2-0425-1B", "google-bert/bert-base-uncased", "google/gemma-2-2b", "google/gemma-3-1b-pt",
    "google/gemma-3-270m", "google/vit-base-patch16-224", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "meta-llama/Meta-Llama-3-70B", "microsoft/phi-2", "openai-community/gpt2", "openai/gpt-oss-20b",
    "openai/whisper-tiny", "tiiuae/falcon-7b",
)  # fmt: skip
"""Hub ids that people often misspell, beside those of data/published.csv."""


def near_hub_names(name: str) -> str:
    """`; did you mean NAME?` where a name is near a model folder beside it, a well-known hub id, or one in the hub's
    cache; else empty. An example of that name goes first, since it needs no hub."""
    if (example := name.rpartition("/")[2].casefold()) in EXAMPLES and ":" not in name:
        return f"; example:{example} needs no hub (`sinkscope examples` describes it)"
    folders = [str(file.parent) for file in Path(name).parent.glob("*/config.json")]
    if said := did_you_mean(name, folders):
        return said
    hub_names = known_hub_names()
    if name in hub_names:  # spelt as it should be
        return ""
    by_part = {hub_name.rpartition("/")[2]: hub_name for hub_name in hub_names}
    near = did_you_mean(name, [f"example:{example}" for example in EXAMPLES] if ":" in name else hub_names)
    if near or "/" in name:
        return near
    full_name = by_part.get(name)
    return f"; did you mean {full_name}?" if full_name else did_you_mean(name, by_part)


def known_hub_names() -> list[str]:
    """Hub ids of data/published.csv, of WELL_KNOWN, and of the models in the hub's cache."""
    table = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    published = (row["ids"].partition("|")[0] for row in csv.DictReader(table.splitlines()))
    return sorted({*filter(None, published), *WELL_KNOWN, *_cached_names()})


def _cached_names() -> Iterable[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
