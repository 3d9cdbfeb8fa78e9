"""The messages of a chat request: roles, and content as a text or as a list of text parts."""

from __future__ import annotations

from typing import Any

from gateway.openai.json_types import shown, shown_name
from services.protocol.request import MAX_MESSAGES
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2

ROLES = {"developer": "system"}
"""Roles that go by another name in chat templates; OpenAI's "developer" is what "system" was."""

IGNORED = frozenset({"name", "tool_call_id", "annotations"})
UNSERVED = frozenset({"tool_calls", "function_call", "audio", "refusal"})
"""Neutral when null or empty, as the official client writes back what it got."""


def read_messages(value: Any) -> list[generation_pb2.ChatMessage]:
    """The conversation. Raises InvalidRequest naming the message, and the part of it, that can't be served."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages", "must be a list with at least one message")
    if len(value) > MAX_MESSAGES:
        raise InvalidRequest("messages", f"must hold 1 to {MAX_MESSAGES} messages, not {len(value)}")
    return [_read_message(f"messages[{index}]", message) for index, message in enumerate(value)]


def _read_message(at: str, message: Any) -> generation_pb2.ChatMessage:
    if not isinstance(message, dict):
        raise InvalidRequest(at, f"must be an object with role and content, not {shown(message)}")
    for name, value in message.items():
        if name in UNSERVED and value not in (None, []):
            raise InvalidRequest(f"{at}.{name}", "is not served yet; leave it out", reason="UNSUPPORTED_PARAMETER")
        if name not in UNSERVED | IGNORED | {"role", "content"}:
            raise InvalidRequest(f"{at}.{shown_name(name)}", "is not a field of a message")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequest(f"{at}.role", f"must be a role such as 'user', not {shown(role)}")
    content = _read_content(f"{at}.content", message.get("content"))
    return generation_pb2.ChatMessage(role=ROLES.get(role, role), content=content)


def _read_content(at: str, content: Any) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(at, f"must be a text or a list of text parts, not {shown(content)}")
    return "".join(_read_part(f"{at}[{index}]", part) for index, part in enumerate(content))


def _read_part(at: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(at, "must be an object with a type, such as {'type': 'text', 'text': '…'}")
    if kind != "text":
        raise InvalidRequest(at, f"the served model takes text only, not a part of type {shown(kind)}")
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{at}.text", f"must be a string, not {shown(part.get('text'))}")
    return str(part["text"])
