"""Run `python tests/support/write_families.py` after a table of tests/engine/test_families.py was changed.

It writes docs/families.json; `python docs/write_pages.py` then writes docs/models.md of that.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]

if __name__ == "__main__":
    sys.path[:0] = [str(TESTS), str(TESTS / "engine")]
    from test_families import record

    text = json.dumps(record(), indent=1) + "\n"
    (TESTS.parent / "docs" / "families.json").write_text(text, encoding="utf-8")
