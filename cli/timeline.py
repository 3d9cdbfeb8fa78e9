"""One request's life as spans of time over all services, from the moments that each of them kept."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from cli.loop import Flow
from services.protocol.views import RequestView

NOW = "now"

OVER = ("answer whole", "caller gone")

SPANS: dict[str, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    "gateway": (("open", ("accepted",), (NOW,)),),
    "tokenizer": (
        ("submit", ("opened",), ("accepted", *OVER)),
        ("to the first token", ("accepted",), ("first token", *OVER)),
        ("streaming", ("first token",), OVER),
        ("caller takes the end", ("answer whole",), ("caller has its end", "caller gone")),
        ("release", ("caller has its end", "caller gone"), ("released",)),
    ),
    "scheduler": (
        ("queued", ("accepted",), ("admitted", "ended")),
        ("prefill", ("admitted",), ("first token", "ended")),
        ("decode", ("first token",), ("ended",)),
        ("kept for replay", ("ended",), (NOW,)),
    ),
}
"""Per service: a span's name, and which moments begin and end it, the first that there is. NOW: while it is held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of a request's life in one service, microseconds since 1970 UTC; `open_`: it goes on."""

    service: str
    name: str
    start_us: int
    end_us: int
    open_: bool = False


def spans_of(flow: Flow) -> list[Span]:
    """All of them, by service in the order in which requests flow."""
    found: list[Span] = []
    for service in SPANS:
        view: RequestView | None = getattr(flow, service)
        if view is not None:
            found += _spans(service, view, flow.at[service].view.unix_us)
    return found


def _spans(service: str, view: RequestView, now_us: int) -> Iterator[Span]:
    moments = {moment.what: moment.unix_us for moment in view.moments}
    for name, begins, ends in SPANS[service]:
        start_us, end_us = _first(moments, begins), _first(moments, ends)
        if start_us is not None and (end_us is not None or not view.ended):
            yield Span(
                service=service,
                name=name,
                start_us=start_us,
                end_us=now_us if end_us is None else end_us,
                open_=end_us is None,
            )


def _first(moments: Mapping[str, int], names: Sequence[str]) -> int | None:
    return next((moments[name] for name in names if name in moments), None)
