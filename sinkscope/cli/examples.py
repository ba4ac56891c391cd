"""`sinkscope examples`: lists the checkpoints that need no model hub."""

from __future__ import annotations

import sys


def examples() -> None:
    """List the example checkpoints, which come with sinkscope or as Python packages, and whether they are installed.

    Example: sinkscope examples
    """
    from sinkscope.checkpoints.examples import EXAMPLES
    from sinkscope.present.terminal.metrics import render_examples

    sys.stdout.write(render_examples(EXAMPLES.values()))
