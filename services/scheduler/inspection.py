"""The scheduler as an operator sees it: how it stands, and its attempts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from services.protocol.hello import Hello, hello_of
from services.protocol.inspection import process_view
from services.protocol.views import Content, ProcessView, RequestView, RouteKey, RouteView, SchedulerView
from services.runtime.app import Runtime
from services.runtime.clock import wall_time
from services.runtime.metrics import SchedulerMetrics, count_of
from services.scheduler.loop import StepLoop
from services.scheduler.servicer import Serving
from services.scheduler.views import AttemptViews


class SchedulerInspection:
    """What a scheduler lets its operators see; `serving` is None while the model is being loaded."""

    def __init__(self, runtime: Runtime, metrics: SchedulerMetrics, serving: Callable[[], Serving | None]) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._serving = serving

    def hello(self) -> Hello:
        """Who it is."""
        serving = self._serving()
        return serving.hello if serving is not None else hello_of(self._runtime.epoch)

    def process(self) -> ProcessView:
        """How it stands."""
        serving = self._serving()
        return process_view(
            self._runtime,
            output_tokens=count_of(self._metrics.output_tokens_total),
            scheduler=None if serving is None else self._scheduler(serving.loop),
        )

    def views(self, request_id: str = "", attempt_id: int = 0, *, brief: bool = False) -> Iterator[RequestView]:
        """Its attempts that are not released, oldest first."""
        serving = self._serving()
        if serving is None:
            return
        loop, clock = serving.loop, self._runtime.clock
        shown = AttemptViews(loop.core, loop.publisher, clock.now(), None if brief else wall_time(clock))
        for attempt in list(loop.core.attempts.values()):
            submission = attempt.submission
            if request_id in ("", submission.request_id) and attempt_id in (0, submission.attempt_id):
                yield shown.of(attempt)

    def total(self) -> int:
        """How many that are."""
        serving = self._serving()
        return len(serving.loop.core.attempts) if serving is not None else 0

    def ended(self) -> Iterable[RequestView]:
        """What it held until lately."""
        serving = self._serving()
        return serving.loop.ended if serving is not None else ()

    def content(self, view: RequestView) -> Content | None:
        """A scheduler has ids, not texts; the tokenizer shows both."""
        return None

    def _scheduler(self, loop: StepLoop) -> SchedulerView:
        load, now = loop.load(), self._runtime.clock.now()
        return SchedulerView(
            waiting=load.waiting_sequences,
            running=load.running_sequences,
            running_max=loop.core.limits.max_running,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            total_blocks=load.total_blocks,
            block_size=load.block_size,
            step_ms=_ms(loop.pulse.started_at, now),
            stepped_ms=_ms(loop.core.stepped_at or None, now),
            stalled=not self._runtime.ready and loop.pulse.started_at is not None,
            routes=tuple(
                RouteView(
                    route=RouteKey(tokenizer=line.route.tokenizer, tokenizer_epoch=line.route.epoch,
                                   generation=line.generation),
                    read=line.read,
                    sequences=line.sequences,
                )
                for line in loop.publisher.lines()
            ),
        )  # fmt: skip


def _ms(since: float | None, now: float) -> int | None:
    return None if since is None else round((now - since) * 1000)
