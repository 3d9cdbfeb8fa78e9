"""A streamed answer as SSE bytes: what never changes within a stream is serialised once, and the text put between."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from gateway.openai.errors import ErrorReply, failure_of
from gateway.openai.event_ids import ChoicePosition, EventIds, Position
from gateway.openai.form import Form
from gateway.openai.json_text import json_object, json_text
from services.protocol.events import Completed, Delta, Finish, FinishReason, Started, StopText, StopToken, Usage
from services.runtime.errors import TailraceError

DONE = b"data: [DONE]\n\n"

_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
_MARK = "\x00"  # stands for the text while a chunk is being cut; JSON writes it as six characters
_ESCAPED_MARK = b'"\\u0000"'


class AnswerChunks:
    """Writes the chunks of one answer; its choices are numbered from `first_choice`.

    With `ids` each event has one. `position`: what the reader has already, and is not written again.
    """

    def __init__(
        self,
        form: Form,
        envelope: dict[str, Any],
        *,
        first_choice: int,
        n: int,
        include_usage: bool,
        logprobs: bool,
        ids: EventIds | None = None,
        position: Position | None = None,
    ) -> None:
        self.usage: Usage | None = None
        self._form = form
        self._envelope = envelope
        self._first_choice = first_choice
        self._null_usage = {"usage": None} if include_usage else {}
        had = position.choices if position is not None else (ChoicePosition(),) * n
        self._opened = position is not None and position.opened
        self._ended = {choice for choice, at in enumerate(had) if at.ended}
        self._ids = ids
        self._logprobs = [form.logprobs(at.text_offset) for at in had] if logprobs else None
        self._cut = [self._cut_chunk(choice) for choice in range(n)]

    def opening(self) -> bytes:
        """What every choice begins with."""
        piece = self._form.opening()
        if piece is None or self._opened:
            return b""
        *others, last = (self._chunk(choice, piece) for choice in range(len(self._cut)))
        # Only with the last one a reader has all of them.
        return b"".join(others) + (self._ids.here() if self._ids is not None else b"") + last

    def encode(self, events: Iterable[Delta | Finish | Completed]) -> tuple[bytes, TailraceError | None]:
        """The bytes of a batch of events; with the failure that ended the answer, after which nothing may follow."""
        parts: list[bytes] = []
        for event in events:
            if type(event) is Delta:  # first and cheapest: it is nearly always one
                if event.text or (self._logprobs and event.tokens):
                    self._delta(event, parts)
            elif isinstance(event, Finish):
                if failure := failure_of(event):
                    return b"".join(parts), failure
                if event.choice not in self._ended:
                    parts.append(self._finish(event))
            elif isinstance(event, Completed):
                self.usage = event.usage
        return b"".join(parts), None

    def _delta(self, delta: Delta, parts: list[bytes]) -> None:
        if self._ids is not None:
            parts.append(self._ids.moved(delta.choice, delta.next_token_offset, delta.next_text_offset))
        if self._logprobs and delta.tokens:
            logprobs = self._logprobs[delta.choice].more(delta.tokens)
            parts.append(self._chunk(delta.choice, self._form.piece(delta.text), logprobs=logprobs))
        else:
            before, after = self._cut[delta.choice]
            parts += (before, json_text(delta.text), after)

    def _finish(self, finish: Finish) -> bytes:
        end = {"finish_reason": finish_reason(finish), "stop_reason": stop_reason(finish)}
        chunk = self._chunk(finish.choice, self._form.piece(""), **end)
        return chunk if self._ids is None else self._ids.ended(finish.choice) + chunk

    def _chunk(self, choice: int, piece: Any, **more: Any) -> bytes:
        entry = {"index": self._first_choice + choice, **piece, "logprobs": None, "finish_reason": None, **more}
        return event({**self._envelope, "choices": [entry], **self._null_usage})

    def _cut_chunk(self, choice: int) -> tuple[bytes, bytes]:
        """The bytes before and after the text of an ordinary chunk."""
        before, mark, after = self._chunk(choice, self._form.piece(_MARK)).rpartition(_ESCAPED_MARK)
        assert mark
        return before, after


def event(value: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json_object(value) + b"\n\n"


def usage_event(envelope: dict[str, Any], usage: dict[str, Any]) -> bytes:
    """The last chunk of a stream that was asked for its usage."""
    return event({**envelope, "choices": [], "usage": usage})


def error_event(reply: ErrorReply) -> bytes:
    """What a client sees instead of the rest."""
    return b"data: " + orjson.dumps(reply.body) + b"\n\n"


def finish_reason(finish: Finish) -> str:
    """A clean end in OpenAI's words."""
    return _FINISH_REASONS[finish.reason]


def stop_reason(finish: Finish) -> str | int | None:
    """What a stop was: the stop text or the stop token's id; null for the model's own end and for a limit."""
    match finish.stop:
        case StopText(text):
            return text
        case StopToken(token_id):
            return token_id
        case _:
            return None


def usage_object(usages: Iterable[Usage]) -> dict[str, Any]:
    """The usage of a call, summed over its prompts."""
    prompt = cached = output = 0
    for usage in usages:
        prompt += usage.prompt_tokens
        cached += usage.cached_prompt_tokens
        output += usage.output_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def envelope_of(form: Form, started: Started, request_id: str, *, streamed: bool) -> dict[str, Any]:
    """What every chunk or answer of a call begins with."""
    return {
        "id": form.id_prefix + request_id,
        "object": form.chunk_object if streamed else form.whole_object,
        "created": started.created_unix_ms // 1000,
        "model": started.model,
    }
