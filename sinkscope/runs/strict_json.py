"""Strict JSON: missing and infinite numbers are null."""

from __future__ import annotations

import json
import math
from typing import Any

import pandas as pd

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
    if data is pd.NA:
        return None
    if hasattr(data, "item"):
        data = data.item()
    if isinstance(data, float) and not math.isfinite(data):
        return None
    return data
