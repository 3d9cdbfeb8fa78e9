"""The detokenizer as an operator sees it: its routes, and the sequences of each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator

from services.detokenizer.route import Route
from services.detokenizer.sequence import Sequence
from services.detokenizer.state import Phase
from services.detokenizer.upstream import TokenStream
from services.protocol.hello import Hello
from services.protocol.hop import count_hops
from services.protocol.inspection import process_view
from services.protocol.views import ChoiceView, Content, HopView, ProcessView, RequestView
from services.runtime.app import Runtime
from services.runtime.metrics import DetokenizerMetrics, count_of


class DetokenizerInspection:
    """What a detokenizer lets its operators see. It knows attempts, not requests."""

    def __init__(
        self,
        runtime: Runtime,
        metrics: DetokenizerMetrics,
        *,
        hello: Hello,
        routes: Collection[Route],
        streams: Callable[[], Iterable[TokenStream]],
    ) -> None:
        self._runtime = runtime
        self._metrics = metrics
        self._hello = hello
        self._routes = routes
        self._streams = streams
        count_hops(runtime.metrics, self._hops, "tokens")
        metrics.held_tokens.set_function(lambda: sum(route.core.held_tokens for route in list(routes)))

    def hello(self) -> Hello:
        """Who it is."""
        return self._hello

    def process(self) -> ProcessView:
        """How it stands."""
        return process_view(self._runtime, hops=self._hops(), output_tokens=count_of(self._metrics.output_tokens_total))

    def views(self, request_id: str = "", attempt_id: int = 0, *, brief: bool = False) -> Iterator[RequestView]:
        """The attempts whose sequences it has, route by route."""
        if request_id:
            return
        for route in list(self._routes):
            for known_id, sequences in list(route.core.attempts()):
                if attempt_id in (0, known_id):
                    choices = [_choice(sequence) for sequence in sequences]
                    yield RequestView(attempt_id=known_id, route=route.key, choices=choices)

    def total(self) -> int:
        """How many that are."""
        return sum(route.core.known_attempts for route in self._routes)

    def ended(self) -> Iterable[RequestView]:
        """Nothing: what a sequence was is told by the tokenizer and the scheduler."""
        return ()

    def content(self, view: RequestView) -> Content | None:
        """Only text that is held back is here."""
        return None

    def _hops(self) -> Iterator[HopView]:
        for tokens in self._streams():
            yield tokens.hop.view("tokens", tokens.address, hello=tokens.peer, route=tokens.route)


def _choice(sequence: Sequence) -> ChoiceView:
    open_ = sequence.phase is Phase.OPEN
    return ChoiceView(
        choice=sequence.choice,
        log_token_offset=sequence.received,
        log_text_offset=sequence.text_end,
        cursor_token_offset=sequence.tokens_sent,
        phase=sequence.phase.name,
        held_for_stop=sequence.held_for_stop if open_ else 0,
        incomplete_character=open_ and sequence.incomplete_character,
    )
