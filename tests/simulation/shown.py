"""A protobuf message in a few words, for the story."""

from __future__ import annotations

from typing import Any

from google.protobuf.text_format import MessageToString

WIDTH = 160


def shown(message: Any) -> str:
    """One line of it."""
    text = MessageToString(message, as_one_line=True)
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
