"""What the hub says of a model: its commit and its files. An answer without end is not read to it."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

from sinkscope.errors import SinkscopeError

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
