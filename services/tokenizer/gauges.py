"""The gauges that count the ledger."""

from __future__ import annotations

from collections import Counter

from services.runtime.clock import Clock
from services.runtime.metrics import CALLER_PHASES, ENGINE_PHASES, TokenizerMetrics
from services.tokenizer.core import Ledger


class LedgerGauges:
    """Sets the gauges of open requests and attempts; cheap when nothing is open."""

    def __init__(self, ledger: Ledger, metrics: TokenizerMetrics, clock: Clock) -> None:
        self._ledger = ledger
        self._clock = clock
        metrics.unsent_tokens.set_function(self._unsent_tokens)
        metrics.oldest_request_age_seconds.set_function(self._oldest_age_s)
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

    def _unsent_tokens(self) -> int:
        """Of answers that somebody reads; those wanted whole are held back until they are."""
        return sum(
            len(log.token_ids) - max(reader.token_offset(choice) for reader in list(entry.readers))
            for entry in list(self._ledger)
            if entry.readers and not entry.pinned.request.whole
            for choice, log in enumerate(entry.log.choices)
        )

    def _oldest_age_s(self) -> float:
        oldest = next(iter(list(self._ledger)), None)
        return 0.0 if oldest is None else self._clock.now() - oldest.opened_at
