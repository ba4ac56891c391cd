"""Ids of the hub's models that a misspelt name may mean."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path

from sinkscope.checkpoints.examples import EXAMPLES
from sinkscope.errors import did_you_mean

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
    """`; did you mean ID?` where a hub id is near a well-known one, or near one in the hub's cache; else empty."""
    known = [each for each in known_hub_names() if each != name]
    by_part = {each.rpartition("/")[2]: each for each in known}
    near = did_you_mean(name, [f"example:{each}" for each in EXAMPLES] if ":" in name else known)
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
