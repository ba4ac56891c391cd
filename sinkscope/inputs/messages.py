"""Reads the messages of a conversation: a role and a text each."""

from __future__ import annotations

from typing import Any

from sinkscope.errors import SinkscopeError
from sinkscope.inputs.rules import check_characters

ROLES = ("system", "developer", "user", "assistant", "tool")


def messages(rows: list[dict[str, Any]], place: str) -> list[dict[str, str]]:
    """Returns role and text of each message. A content may be a list of parts, as vision-language models have it, all
    of them text. `place` names the conversation in errors.

    Raises SinkscopeError where there is no message, for a role that is unknown and for a content that is no text.
    """
    if not rows:
        raise SinkscopeError(f"{place} holds no message")
    return [_message(row, f"{place}, message {number}") for number, row in enumerate(rows)]


def _message(row: dict[str, Any], place: str) -> dict[str, str]:
    role, content = row.get("role"), row.get("content")
    if role not in ROLES:
        raise SinkscopeError(f"{place}: role {role!r} is none of {', '.join(ROLES)}")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not content.strip():
        raise SinkscopeError(f"{place} ({role}): its `content` is no text")
    check_characters(content, place)
    return {"role": role, "content": content}
