"""Whether the installed transformers makes of a GGUF the tokenizer that its model was trained with."""

from __future__ import annotations

RIGHT_SINCE = (5, 23)
"""The first transformers that does. Earlier ones leave out the BOS that the file asks for, which moves every sink, and
5.17 also splits Gemma's text into single letters."""


def gguf_problem() -> str | None:
    """Why no tokenizer can be made of a GGUF here; None where one can."""
    from transformers import __version__

    if tuple(int(part) for part in __version__.split(".")[:2]) >= RIGHT_SINCE:
        return None
    needed = ".".join(map(str, RIGHT_SINCE))
    return f"transformers {__version__} leaves out the BOS that a GGUF asks for: pip install 'transformers>={needed}'"
