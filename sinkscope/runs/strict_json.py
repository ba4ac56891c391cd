"""Strict JSON: missing and infinite numbers are null."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from sinkscope.runs.schema.base import Record


def to_json(data: Any) -> str:
    """The text of a JSON file; NaN and infinities become null."""
    return json.dumps(plain(data), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def plain(data: Any) -> Any:
    """Converts data to JSON's types: NaN, infinities and pandas' NA become None, records become dictionaries."""
    if isinstance(data, str):
        return data
    if isinstance(data, Record):
        data = data.as_dict()
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if _is_na(data):
        return None
    if hasattr(data, "item"):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data


def _is_na(data: Any) -> bool:
    """Whether it is pandas' NA, which nothing can be where pandas was never imported."""
    pandas = sys.modules.get("pandas")
    return pandas is not None and data is pandas.NA
