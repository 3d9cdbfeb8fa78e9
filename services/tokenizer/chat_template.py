"""A conversation as the text that the model was trained on, by the model's own template."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from services.protocol.request import Message
from services.runtime.errors import InvalidRequest, PreconditionFailed

LONG_CONVERSATION_CHARS = 8000
"""A conversation from here on is rendered in a thread."""

Render = Callable[[Sequence[dict[str, str]]], str]


class ChatTemplate:
    """The template of a model directory, run in transformers' sandboxed Jinja, as the model's authors tested it.

    transformers takes seconds to import, so that is done in a thread, by `load` or by the first conversation.
    """

    def __init__(self, directory: Path) -> None:
        config = _read_config(directory / "tokenizer_config.json")
        self._source = _source(directory, config)
        self._tokens = {name: _token(config, name) for name in ("bos_token", "eos_token")}
        self._render: Render | None = None
        self._loading = asyncio.Lock()

    async def load(self) -> None:
        """Makes the template ready; a model without one is fine until somebody chats with it."""
        async with self._loading:
            if self._render is None and self._source is not None:
                self._render = await asyncio.to_thread(_compile, self._source, self._tokens)

    async def render(self, messages: Sequence[Message], field: str) -> str:
        """The conversation's text, up to where the answer begins; special tokens are written out in it.

        Raises InvalidRequest naming `field` when the template refuses the conversation, with what it said.
        """
        await self.load()
        render = self._render
        if render is None:
            raise InvalidRequest(field, "this model has no chat template")
        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            if sum(len(message.content) for message in messages) < LONG_CONVERSATION_CHARS:
                return render(turns)
            return await asyncio.to_thread(render, turns)
        except Exception as error:  # a template may raise anything, and what it raises is about the conversation
            raise InvalidRequest(field, f"the chat template says: {error}") from error


def _compile(source: str, tokens: dict[str, str]) -> Render:
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(turns: Sequence[dict[str, str]]) -> str:
        rendered: tuple[list[str], object] = render_jinja_template(  # type: ignore[assignment]  # annotated as str
            [list(turns)],
            chat_template=source,
            add_generation_prompt=True,
            bos_token=tokens["bos_token"],
            eos_token=tokens["eos_token"],
        )
        return rendered[0][0]

    return render


def _source(directory: Path, config: dict[str, Any]) -> str | None:
    """The template's text: of its own file, or else out of the tokenizer's configuration."""
    path = directory / "chat_template.jinja"
    if path.exists():
        return path.read_text("utf-8")
    source = config.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = {item.get("name"): item.get("template") for item in source}.get("default")
    return source if isinstance(source, str) else None


def _token(config: dict[str, Any], name: str) -> str:
    """A special token's text; older configurations keep an object there."""
    token = config.get(name)
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise PreconditionFailed(f"{path} isn't JSON: {error}") from error
    return config if isinstance(config, dict) else {}
