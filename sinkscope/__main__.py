"""`python -m sinkscope` is the `sinkscope` command."""

from __future__ import annotations

from sinkscope.cli import main

if __name__ == "__main__":
    main()
