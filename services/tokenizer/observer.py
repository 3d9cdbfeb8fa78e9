"""What operators learn of requests: metrics, spans, one log line per end. Nothing runs once per token and request."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from services.protocol.events import FinishReason
from services.protocol.inspection import EndedRequests
from services.runtime.clock import Clock, wall_time
from services.runtime.error_tree import TailraceError
from services.runtime.log import get_logger
from services.runtime.metrics import TokenizerMetrics
from services.runtime.trace import NO_TRACER, TraceContext, Tracer
from services.tokenizer.effects import Progressed
from services.tokenizer.entry import Attempt, Cut, Entry
from services.tokenizer.spans import RequestSpans
from services.tokenizer.views import EntryViews

_log = get_logger("tokenizer")


class Observer:
    """Counts, traces and logs what happens to requests."""

    def __init__(self, metrics: TokenizerMetrics, clock: Clock, tracer: Tracer = NO_TRACER) -> None:
        self.ended = EndedRequests()
        self._spans = RequestSpans(tracer)
        self._metrics = metrics
        self._clock = clock
        self._let_go = {cut: metrics.let_go_total.labels(cut.name) for cut in Cut}
        self._ended = {reason: metrics.requests_total.labels(reason.name) for reason in FinishReason}

    def opened(self, entry: Entry, *, arrived_at: float, encoding_at: float) -> None:
        """It is in the ledger; when it came, and when its encoding began."""
        self._spans.opened(entry, arrived_at=arrived_at, encoding_at=encoding_at)

    def claiming(self, entry: Entry) -> None:
        """It is being taken over."""
        self._spans.claimed(entry)

    def accepted(self, entry: Entry) -> None:
        """A scheduler has the request."""
        entry.accepted_at = self._clock.now()
        self._metrics.accepted_total.inc()
        if entry.held:
            self._metrics.claimed_total.inc()
        self._metrics.prompt_tokens_total.inc(len(entry.pinned.prompt_ids))
        self._metrics.acceptance_seconds.observe(entry.accepted_at - entry.opened_at)

    def refused(self, entry: Entry, error: TailraceError) -> None:
        """No scheduler has it."""
        self._spans.refused(entry, error)

    def submitted(self, attempt: Attempt) -> None:
        """An attempt is on its way; every one but the first goes on with what a dead scheduler began."""
        if len(attempt.entry.attempts) > 1:
            self._metrics.failovers_total.inc()
        self._spans.submitted(attempt, self._clock.now())

    def released(self, attempt: Attempt) -> None:
        """Nothing remembers an attempt at its scheduler."""
        self._spans.released(attempt, self._clock.now())

    def attached(self, entry: Entry, trace: TraceContext | None, since: float) -> None:
        """The same request came once more."""
        self._spans.attached(entry, trace, since, self._clock.now())

    def resumed(self, entry: Entry, trace: TraceContext | None, since: float) -> None:
        """A caller took its request up again."""
        self._metrics.resumes_total.inc()
        self.attached(entry, trace, since)

    def progressed(self, progress: Progressed) -> None:
        """New output came for some requests, all in one message."""
        for seconds in progress.to_first_s:
            self._metrics.time_to_first_token_seconds.observe(seconds)
        for seconds, count in progress.between_s.items():
            self._metrics.inter_token_latency_seconds.observe(seconds, count)

    def finished(self, entry: Entry) -> None:
        """The answer is whole. Its reason, for the count, is its choices' most serious one."""
        self._spans.finished(entry)
        usage, completed_at = entry.log.usage, entry.completed_at
        if not entry.accepted or usage is None or completed_at is None:
            return
        attempt, first_output_at = entry.attempts[-1], entry.first_output_at
        reasons = Counter(log.finish.reason for log in entry.log.choices if log.finish is not None)
        worst = max(reasons, key=lambda reason: reason.value)
        self._ended[worst].inc()
        self._metrics.end_to_end_seconds.observe(completed_at - entry.opened_at)
        tokens = len(entry.log.choices[0].token_ids)
        if first_output_at is not None and tokens > 1:
            self._metrics.time_per_output_token_seconds.observe((completed_at - first_output_at) / (tokens - 1))
        _log.info(
            "request finished",
            request_id=entry.request_id,
            tenant=entry.tenant,
            reason=worst.name,
            attempt=f"{attempt.attempt_id:x}",
            attempts=len(entry.attempts),
            scheduler=attempt.scheduler,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_prompt_tokens,
            output_tokens=usage.output_tokens,
            first_token_s=None if first_output_at is None else round(first_output_at - entry.opened_at, 3),
            seconds=round(completed_at - entry.opened_at, 3),
            **({} if entry.span is None else {"trace_id": entry.span.context.trace_id}),
        )

    def unacceptable(self, entry: Entry, why: str) -> None:
        """Two accounts of the answer differed."""
        self._metrics.integrity_errors_total.inc()
        _log.error("integrity error", request_id=entry.request_id, tenant=entry.tenant, why=why)

    def let_go(self, entry: Entry) -> None:
        """The request is another tokenizer's, or nobody's."""
        cut = entry.cut
        assert cut is not None
        if entry.accepted:
            self._let_go[cut].inc()
        _log.warning("request let go", request_id=entry.request_id, tenant=entry.tenant, why=cut.name)

    def forgotten(self, entry: Entry) -> None:
        """Nothing remembers the request."""
        released = [attempt.released_at for attempt in entry.attempts if attempt.released_at is not None]
        if entry.finished_at is not None and released:
            self._metrics.finish_to_release_seconds.observe(max(0.0, max(released) - entry.finished_at))
        self._spans.forgotten(entry, self._clock.now())
        view = EntryViews(self._clock.now(), wall_time(self._clock)).of(entry)
        self.ended.add(replace(view, ended=True))
