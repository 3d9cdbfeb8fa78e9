"""Where a request stands in a distributed trace, and spans as our code knows them; otel.py makes real ones.

A context travels with the message that opens a request at the next process, and what is done there is a child of it.
A span is begun early where others need its context; phases are told afterwards, from times that are kept anyway. So
nothing happens per token, and without tracing nothing but a context's hand-over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"
STATE_CHARS_MAX = 512

_SAMPLED = 0x01
_TRACEPARENT = re.compile(r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
NONE: Attributes = {}


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span as others refer to it: ids as lower-case hex digits, as W3C Trace Context writes them."""

    trace_id: str
    span_id: str
    flags: int = _SAMPLED
    state: str = ""

    @property
    def traceparent(self) -> str:
        """As it travels."""
        return f"00-{self.trace_id}-{self.span_id}-{self.flags:02x}"


def read_context(traceparent: str, tracestate: str = "") -> TraceContext | None:
    """The context that these say; None for what the standard has nobody trust. A later version is read as the first.

    A tracestate that is too long is left out, and the rest stands.
    """
    found = _TRACEPARENT.fullmatch(traceparent.strip(" \t"))
    if found is None or (found[1] == "00" and found[5]):
        return None
    state = tracestate if len(tracestate) <= STATE_CHARS_MAX else ""
    return TraceContext(found[2], found[3], int(found[4], 16), state)


def read_headers(parents: Sequence[str], states: Sequence[str]) -> TraceContext | None:
    """A caller's context, of all its headers of either name; None without exactly one traceparent."""
    return read_context(parents[0], ",".join(states)) if len(parents) == 1 else None


class Kind(Enum):
    """What a span is to the one that it is a child of."""

    INTERNAL = "internal"
    SERVER = "server"
    CLIENT = "client"
    CONSUMER = "consumer"


class Span(Protocol):
    """Something that is going on, of which others need to know before it ends. Moments are `Clock.now()`."""

    @property
    def context(self) -> TraceContext:
        """What it is to others."""

    def named(self, name: str) -> None:
        """Its name is known now."""

    def set(self, attributes: Attributes) -> None:
        """More is known of it."""

    def begin(
        self,
        name: str,
        at: float,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> Span:
        """A part of it that others need to know of."""

    def phase(
        self,
        name: str,
        start: float,
        end: float,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> None:
        """A part of it that is over."""

    def event(self, name: str, at: float, attributes: Attributes = NONE) -> None:
        """Something happened meanwhile."""

    def end(self, at: float, attributes: Attributes = NONE, *, error: str = "") -> None:
        """It is over; `error`: what kind of failure ended it, a word from a bounded set."""


class Tracer(Protocol):
    """Begins spans, of requests that are traced."""

    def door(self, name: str, caller: TraceContext | None, at: float) -> Span | None:
        """A caller's call, which begins a trace where its caller didn't. None when it is not to be recorded."""

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        at: float,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> Span | None:
        """What this process does for another one. None when `parent` is, or is not recorded."""


class NoTracer:
    """No tracing."""

    def door(self, name: str, caller: TraceContext | None, at: float) -> Span | None:
        """Nothing."""
        return None

    def begin(
        self,
        name: str,
        parent: TraceContext | None,
        at: float,
        *,
        kind: Kind = Kind.INTERNAL,
        attributes: Attributes = NONE,
        links: Sequence[TraceContext] = (),
    ) -> Span | None:
        """Nothing."""
        return None


NO_TRACER = NoTracer()


def context_of(span: Span | None, otherwise: TraceContext | None = None) -> TraceContext | None:
    """What is handed on: the span's, and where nothing is recorded what came."""
    return otherwise if span is None else span.context
