"""Libraries that a test runs sinkscope beside, and that no other test needs."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

ALL = os.environ.get("SINKSCOPE_LIBRARIES") == "all"


def library(name: str) -> Any:
    """The library. The test skips where it is not installed or does not import (a torchvision of another torch), unless
    SINKSCOPE_LIBRARIES=all asks for every one."""
    if ALL:
        return importlib.import_module(name)
    return pytest.importorskip(name, exc_type=(ImportError, RuntimeError))  # type: ignore[arg-type]
