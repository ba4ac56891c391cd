"""What a model's name and its loading options may be: checked without torch, so that a slip is refused at once."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from sinkscope.checkpoints.examples import find_example
from sinkscope.errors import SinkscopeError, did_you_mean

DTYPES = ("float32", "bfloat16", "float16", "float64")
"""The dtypes that a model may be loaded in, as torch calls them."""

WELL_KNOWN = (
    "EleutherAI/pythia-1b", "EleutherAI/pythia-160m", "EleutherAI/pythia-410m", "FacebookAI/roberta-base",
    "HuggingFaceTB/SmolLM2-135M", "Qwen/Qwen2.5-0.5B", "Qwen/Qwen2.5-7B", "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B",
    "allenai/OLMo-2-0425-1B", "google-bert/bert-base-uncased", "google/gemma-2-2b", "google/gemma-3-1b-pt",
    "google/gemma-3-270m", "google/vit-base-patch16-224", "meta-llama/Llama-3.2-1B", "meta-llama/Llama-3.2-3B",
    "meta-llama/Meta-Llama-3-70B", "microsoft/phi-2", "openai-community/gpt2", "openai/gpt-oss-20b",
    "openai/whisper-tiny", "tiiuae/falcon-7b",
)  # fmt: skip
"""Hub ids that people often misspell, beside those of data/published.csv."""


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
    from sinkscope.checkpoints.sources import find_source, path_of

    if not name.strip() or not path_of(name).exists():
        find_source(name, revision, allow_pickle)


def near_hub_names(name: str) -> str:
    """`; did you mean ID?` where a hub id is near a well-known one, or near one in the hub's cache; else empty."""
    known = [each for each in known_hub_names() if each != name]
    by_part = {each.rpartition("/")[2]: each for each in known}
    near = did_you_mean(name, known)
    if near or "/" in name:
        return near
    found = by_part.get(name)
    return f"; did you mean {found}?" if found else did_you_mean(name, by_part)


def known_hub_names() -> list[str]:
    """Hub ids of data/published.csv, of WELL_KNOWN, and of the models in the hub's cache."""
    table = (files("sinkscope") / "data" / "published.csv").read_text("utf-8")
    published = (row["ids"].partition("|")[0] for row in csv.DictReader(table.splitlines()))
    return sorted({*filter(None, published), *WELL_KNOWN, *_cached_names()})


def _cached_names() -> Iterable[str]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = Path(HF_HUB_CACHE).glob("models--*")
    return [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
