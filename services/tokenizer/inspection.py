"""The tokenizer as an operator sees it: how it stands, and its ledger."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from services.protocol.hello import Hello
from services.protocol.hop import count_hops
from services.protocol.inspection import process_view
from services.protocol.views import Content, HopView, ProcessView, RequestView
from services.runtime.app import Runtime
from services.runtime.clock import wall_time
from services.runtime.metrics import TokenizerMetrics, count_of
from services.tokenizer.core import Ledger
from services.tokenizer.entry import Entry
from services.tokenizer.observer import Observer
from services.tokenizer.upstream import SchedulerLink
from services.tokenizer.views import EntryViews, content_of


class TokenizerInspection:
    """What a tokenizer lets its operators see. `show_content`: prompts and outputs too, to those who ask for them."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: TokenizerMetrics,
        *,
        hello: Callable[[], Hello],
        ledger: Ledger,
        links: Mapping[str, SchedulerLink],
        observer: Observer,
        show_content: bool,
    ) -> None:
        self.hello = hello
        self._runtime = runtime
        self._metrics = metrics
        self._ledger = ledger
        self._links = links
        self._observer = observer
        self._show_content = show_content
        count_hops(runtime.metrics, self._hops, "text", "load")

    def process(self) -> ProcessView:
        """How it stands."""
        return process_view(self._runtime, hops=self._hops(), output_tokens=count_of(self._metrics.output_tokens_total))

    def views(self, request_id: str = "", attempt_id: int = 0, *, brief: bool = False) -> Iterator[RequestView]:
        """The ledger's entries, oldest first."""
        clock = self._runtime.clock
        shown = EntryViews(clock.now(), None if brief else wall_time(clock))
        return (shown.of(entry) for entry in list(self._ledger) if _is(entry, request_id, attempt_id))

    def total(self) -> int:
        """How many that are."""
        return len(self._ledger)

    def ended(self) -> Iterable[RequestView]:
        """What it held until lately."""
        return self._observer.ended

    def content(self, view: RequestView) -> Content | None:
        """A request's prompt and output, while it is in the ledger."""
        if not self._show_content:
            return None
        found = [entry for entry in self._ledger if _is(entry, view.request_id, view.attempt_id)]
        return content_of(found[-1]) if found else None

    def _hops(self) -> Iterator[HopView]:
        for link in self._links.values():
            yield from link.hops()


def _is(entry: Entry, request_id: str, attempt_id: int) -> bool:
    if request_id not in ("", entry.request_id):
        return False
    return not attempt_id or any(attempt.attempt_id == attempt_id for attempt in entry.attempts)
