"""What the gateway shows of its open streams. Never prompts or outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.answer import RemoteAnswer
from services.protocol.inspection import ChoiceView, RequestView
from services.runtime.clock import Clock


def views_of(answers: Iterable[RemoteAnswer], clock: Clock) -> Iterator[RequestView]:
    """One view per open answer, oldest first."""
    now_ms = clock.unix_ms()
    for answer in answers:
        stream = answer.stream
        yield RequestView(
            request_id=stream.request_id,
            caller_phase=stream.phase.name,
            age_ms=max(0, now_ms - answer.started.created_unix_ms),
            choices=[
                ChoiceView(
                    choice=choice,
                    log_token_offset=len(log.token_ids),
                    log_text_offset=log.text_length,
                    cursor_token_offset=taken,
                )
                for choice, (log, (taken, _)) in enumerate(
                    zip(stream.log.choices, stream.cursor.offsets(), strict=True)
                )
            ],
        )
