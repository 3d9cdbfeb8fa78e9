"""The gateway as an operator sees it: its links, and the answers that are being read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from gateway.answer import RemoteAnswer
from gateway.places import Places
from gateway.requests import OpenAnswers
from gateway.router import Router
from services.protocol.hello import Hello, hello_of
from services.protocol.hop import count_hops
from services.protocol.inspection import process_view
from services.protocol.slow_readers import SlowReaders
from services.protocol.views import ChoiceView, Content, HopView, Moment, ProcessView, RequestView
from services.runtime.app import Runtime
from services.runtime.metrics import GatewayMetrics, count_of


class GatewayInspection:
    """What the gateway lets its operators see."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: GatewayMetrics,
        *,
        answers: OpenAnswers,
        places: Places,
        router: Router,
        slow_readers: SlowReaders[RemoteAnswer],
    ) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._answers = answers
        self._places = places
        self._router = router
        self._slow_readers = slow_readers
        count_hops(runtime.metrics, self._hops, "events")
        metrics.unread_tokens.set_function(self._unread_tokens)
        metrics.unread_seconds.set_function(slow_readers.longest_s)
        metrics.oldest_request_age_seconds.set_function(self._oldest_age_s)

    def hello(self) -> Hello:
        """Who it is."""
        return hello_of(self._runtime.epoch)

    def process(self) -> ProcessView:
        """How it stands."""
        # The counter counts an answer's tokens at its end.
        tokens = count_of(self._metrics.output_tokens_total) + sum(answer.tokens for answer in self._answers)
        return process_view(self._runtime, hops=self._hops(), output_tokens=tokens)

    def views(self, request_id: str = "", attempt_id: int = 0, *, brief: bool = False) -> Iterator[RequestView]:
        """The answers that callers read, oldest first. It knows no attempts."""
        if attempt_id:
            return
        for answer in self._answers:
            if request_id in ("", answer.stream.request_id):
                yield self._view(answer)

    def total(self) -> int:
        """How many that are."""
        return len(self._answers)

    def ended(self) -> Iterable[RequestView]:
        """Nothing: how a request ended is told by its tokenizer."""
        return ()

    def content(self, view: RequestView) -> Content | None:
        """Prompts are the tokenizer's."""
        return None

    def _unread_tokens(self) -> int:
        return sum(
            len(log.token_ids) - taken
            for answer in self._answers
            for log, (taken, _) in zip(answer.stream.log.choices, answer.stream.cursor.offsets(), strict=True)
        )

    def _oldest_age_s(self) -> float:
        oldest = next(iter(self._answers), None)
        return 0.0 if oldest is None else max(self._runtime.clock.unix_ms() - oldest.started.created_unix_ms, 0) / 1000

    def _hops(self) -> Iterator[HopView]:
        for link in self._router.links:
            yield link.hop.view("events", link.address, hello=link.peer)

    def _view(self, answer: RemoteAnswer) -> RequestView:
        stream, clock = answer.stream, self._runtime.clock
        stuck_since = self._slow_readers.stuck_since(answer)
        idle_ms = 0 if stuck_since is None else round((clock.now() - stuck_since) * 1000)
        taken = [tokens for tokens, _ in stream.cursor.offsets()]
        return RequestView(
            request_id=stream.request_id,
            caller_phase=stream.phase.name,
            age_ms=max(0, clock.unix_ms() - answer.started.created_unix_ms),
            stream_id=self._places.number_of(stream),
            upstream_epoch=stream.peer_epoch,
            prompt_tokens=answer.started.prompt_tokens,
            whole=stream.whole,
            waits_for="TOKENIZER" if stream.stranded else "" if answer.waiting else "CALLER",
            moments=[Moment(what="accepted", unix_us=answer.started.created_unix_ms * 1000)],
            choices=[
                ChoiceView(
                    choice=choice,
                    log_token_offset=log.token_length,
                    log_text_offset=log.text_length,
                    cursor_token_offset=taken[choice],
                    idle_ms=idle_ms,
                    finish_reason=log.finish.reason.name if log.finish is not None else "",
                )
                for choice, log in enumerate(stream.log.choices)
            ],
        )
