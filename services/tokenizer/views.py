"""What operators see of the ledger, and the gauges that count it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from services.protocol.inspection import ChoiceView, RequestView
from services.runtime.metrics import CALLER_PHASES, ENGINE_PHASES, TokenizerMetrics
from services.tokenizer.core import Ledger
from services.tokenizer.entry import Entry


def views(ledger: Ledger, now: Callable[[], float]) -> Iterator[RequestView]:
    """Every entry, oldest first."""
    moment = now()
    return (_view(entry, moment) for entry in list(ledger))


class LedgerGauges:
    """Sets the gauges of open requests and attempts; cheap when nothing is open."""

    def __init__(self, ledger: Ledger, metrics: TokenizerMetrics) -> None:
        self._ledger = ledger
        self._requests = {phase: metrics.open_requests.labels(phase) for phase in CALLER_PHASES}
        self._attempts = {phase: metrics.open_attempts.labels(phase) for phase in ENGINE_PHASES}
        self._retained = metrics.retained_answers
        self._reserved = metrics.retention_reserved_bytes
        self._idle = True

    def set(self) -> None:
        """Counts what is open now."""
        idle = not len(self._ledger)
        if idle and self._idle:
            return
        self._idle = idle
        requests = Counter(entry.caller.name for entry in self._ledger)
        attempts = Counter(attempt.phase.name for attempt in self._ledger.attempts)
        self._retained.set(sum(entry.detached and entry.completed for entry in self._ledger))
        self._reserved.set(self._ledger.retention.reserved_bytes)
        for phase, gauge in self._requests.items():
            gauge.set(requests[phase])
        for phase, gauge in self._attempts.items():
            gauge.set(attempts[phase])


def _view(entry: Entry, now: float) -> RequestView:
    attempt = entry.attempts[-1]
    return RequestView(
        request_id=entry.request_id,
        attempt_id=attempt.attempt_id,
        caller_phase=entry.caller.name,
        engine_phase=attempt.phase.name,
        age_ms=round((now - entry.opened_at) * 1000),
        choices=[
            ChoiceView(
                choice=choice,
                log_token_offset=len(log.token_ids),
                log_text_offset=log.text_length,
                cursor_token_offset=_cursor(entry, choice),
                idle_ms=round((now - entry.progress_at) * 1000),
            )
            for choice, log in enumerate(entry.log.choices)
        ],
    )


def _cursor(entry: Entry, choice: int) -> int:
    """Where the furthest reader stands."""
    return max((reader.token_offset(choice) for reader in entry.readers), default=0)
