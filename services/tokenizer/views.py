"""The ledger's requests as an operator sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from services.protocol.request import ChatPrompt, IdsPrompt, TextPrompt
from services.protocol.views import ChoiceView, Content, Moment, ReaderView, RequestView
from services.tokenizer.entry import Entry, Reader
from services.tokenizer.gateway_streams import GatewayStream
from services.tokenizer.state import CallerPhase, EnginePhase


class EntryViews:
    """Makes the views of one listing, all at one moment; without a calendar they have no moments."""

    def __init__(self, now: float, unix_us: Callable[[float], int] | None) -> None:
        self._now = now
        self._unix_us = unix_us

    def of(self, entry: Entry) -> RequestView:
        """One request, with its latest attempt."""
        attempt = entry.attempts[-1]
        return RequestView(
            request_id=entry.request_id,
            tenant=entry.tenant,
            attempt_id=attempt.attempt_id,
            attempts=len(entry.attempts),
            caller_phase=entry.caller.name,
            engine_phase=attempt.phase.name,
            age_ms=round((self._now - entry.opened_at) * 1000),
            upstream=attempt.scheduler,
            upstream_epoch=attempt.epoch,
            readers=[_reader(reader, len(entry.log.choices)) for reader in entry.readers],
            prompt_tokens=len(entry.pinned.prompt_ids),
            deadline_in_ms=None if entry.deadline is None else round((entry.deadline - self._now) * 1000),
            whole=entry.pinned.request.whole,
            waits_for=_waits_for(entry),
            moments=self._moments(entry),
            finished_ms=None if entry.finished_at is None else round((self._now - entry.finished_at) * 1000),
            choices=self._choices(entry),
        )

    def _moments(self, entry: Entry) -> list[Moment]:
        if self._unix_us is None:
            return []
        return [Moment(what, self._unix_us(moment)) for what, moment in _moments(entry)]

    def _choices(self, entry: Entry) -> list[ChoiceView]:
        idle_ms = round((self._now - entry.progress_at) * 1000)
        return [
            ChoiceView(
                choice=choice,
                log_token_offset=len(log.token_ids),
                log_text_offset=log.text_length,
                cursor_token_offset=max((reader.token_offset(choice) for reader in entry.readers), default=0),
                idle_ms=idle_ms,
                finish_reason=log.finish.reason.name if log.finish is not None else "",
            )
            for choice, log in enumerate(entry.log.choices)
        ]


def content_of(entry: Entry) -> Content:
    """What its caller wrote and was answered."""
    match entry.pinned.request.prompt:
        case TextPrompt(text):
            prompt = text
        case ChatPrompt(messages):
            prompt = "\n".join(f"{message.role}: {message.content}" for message in messages)
        case IdsPrompt():
            prompt = ""
        case other:
            assert_never(other)
    return Content(
        prompt_ids=entry.pinned.prompt_ids, prompt=prompt, outputs=[log.text_from(0) for log in entry.log.choices]
    )


def _reader(reader: Reader, choices: int) -> ReaderView:
    offsets = tuple(reader.token_offset(choice) for choice in range(choices))
    if isinstance(reader, GatewayStream):
        return ReaderView(gateway_epoch=reader.gateway.epoch, stream_id=reader.stream_id, token_offsets=offsets)
    return ReaderView(token_offsets=offsets)


def _moments(entry: Entry) -> list[tuple[str, float]]:
    """What happened to it, in order."""
    attempt = entry.attempts[-1]
    delivered = entry.caller is not CallerPhase.GONE
    times = {
        "opened": entry.opened_at,
        "accepted": entry.accepted_at,
        "first token": entry.first_output_at,
        "last token": entry.progress_at if entry.has_output else None,
        "scheduler lost": entry.stranded_at,
        "abort asked for": entry.aborted_at,
        "engine ended": attempt.ended_at,
        "answer whole": entry.completed_at,
        "caller has its end" if delivered else "caller gone": entry.finished_at,
        "release answered": attempt.release_answered_at,
        "released": attempt.released_at,
    }
    return sorted(((what, at) for what, at in times.items() if at is not None), key=lambda moment: moment[1])


def _waits_for(entry: Entry) -> str:
    """The one thing without which nothing goes on; empty while nothing is missing."""
    attempt = entry.attempts[-1]
    if entry.stranded_at is not None and not entry.completed:
        return "TURN" if entry.waits_for_turn else "SCHEDULER"
    if entry.is_handed_over:
        return "CLAIMER"
    if attempt.phase is EnginePhase.RELEASING:
        return "RELEASE_ANSWER" if attempt.release_answered_at is None else "MARKER"
    return ""
