"""The gauges that count the ledger."""

from __future__ import annotations

from collections import Counter

from services.runtime.metrics import CALLER_PHASES, ENGINE_PHASES, TokenizerMetrics
from services.tokenizer.core import Ledger


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
