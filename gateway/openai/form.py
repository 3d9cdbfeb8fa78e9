"""What chat and completions differ in: how a request is read, and how a piece of an answer looks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gateway.openai.call import Call
from services.protocol.events import TokenInfo


class Form(Protocol):
    """One endpoint's shapes. Objects are dicts that go through orjson; the hot chunk is cut into bytes once."""

    @property
    def letter(self) -> str:
        """Stands for it in an event's id."""

    @property
    def id_prefix(self) -> str:
        """Such as "chatcmpl-"."""

    @property
    def whole_object(self) -> str:
        """`object` of an answer that isn't streamed."""

    @property
    def chunk_object(self) -> str:
        """`object` of a chunk of one that is."""

    def read(self, body: Mapping[str, Any], request_id: str) -> Call:
        """A request. Raises InvalidRequest."""

    def opening(self) -> Mapping[str, Any] | None:
        """The piece that opens each streamed choice, if there is one."""

    def piece(self, text: str) -> Mapping[str, Any]:
        """A piece of a streamed choice; `text` "" at its end."""

    def whole(self, text: str) -> Mapping[str, Any]:
        """A choice that isn't streamed."""

    def logprobs(self, text_offset: int = 0) -> LogprobsForm:
        """Writes one choice's token-level output, from a code point of it on."""


class LogprobsForm(Protocol):
    """Token-level output of one choice, delta after delta."""

    def more(self, tokens: Sequence[TokenInfo]) -> dict[str, Any]:
        """The object for the next tokens."""
