"""Logs to streams: which call is to be sent what. Nothing here waits, and generation never waits for it.

Logs grow, and whenever a call can be written to it takes what lies beyond its cursors. A route's new call starts every
one of its sequences at token 0; live ones go first, the replay in slices between.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from services.protocol.outbox import Outbox
from services.runtime.error_tree import Superseded
from services.scheduler.call import Call, Cursor
from services.scheduler.effects import Effect, Ended, LeaseEnded, Moved, Opened, Progressed, Released
from services.scheduler.engine.api import SequenceKey
from services.scheduler.submission import Route
from services.scheduler.token_log import TokenLog

MAX_QUIET_ROUTES = 1024
"""Routes with no call and no log whose generation is still remembered; beyond it the oldest is forgotten."""


@dataclass(slots=True, eq=False)
class _Line:
    """One route: the logs that belong to it, the highest generation seen, and the call that is open."""

    logs: dict[SequenceKey, TokenLog] = field(default_factory=dict)
    generation: int = 0
    call: Call | None = None


@dataclass(frozen=True, slots=True)
class LineView:
    """A route as operators see it: its highest generation, whether it is read, and how many logs are kept for it."""

    route: Route
    generation: int
    read: bool
    sequences: int


class Publisher:
    """All routes of this scheduler."""

    def __init__(self) -> None:
        self._lines: dict[Route, _Line] = {}

    @property
    def log_sequences(self) -> int:
        """Sequences whose ids are kept."""
        return sum(len(line.logs) for line in self._lines.values())

    def lines(self) -> list[LineView]:
        """The routes that are read or have logs."""
        return [
            LineView(route, line.generation, line.call is not None, len(line.logs))
            for route, line in self._lines.items()
            if line.call is not None or line.logs
        ]

    def generation_of(self, route: Route) -> int:
        """The highest generation seen of a route."""
        return self._lines[route].generation if route in self._lines else 0

    def has_call(self, route: Route) -> bool:
        """Whether somebody reads this route."""
        return route in self._lines and self._lines[route].call is not None

    def open(self, route: Route, generation: int) -> Call:
        """A new call of a route, which starts every sequence at token 0 and ends an older call. Raises Superseded."""
        line = self._line(route)
        if generation < line.generation:
            raise Superseded(f"generation {line.generation} of this route was opened before {generation} came")
        if line.call is not None:
            line.call.superseded = True
            line.call.wake()
        line.generation = generation
        line.call = call = Call(route, generation)
        for log in line.logs.values():
            log.cursor = Cursor(call, log, replaying=True)
        call.outbox = Outbox([log.cursor for log in line.logs.values() if log.cursor is not None])
        return call

    def close_all(self) -> None:
        """This process stops: every call ends once it has been given all there is."""
        for line in self._lines.values():
            if line.call is not None:
                line.call.closing = True
                line.call.wake()

    def close(self, call: Call) -> None:
        """A call has ended; the logs stay for the next one."""
        line = self._lines.get(call.route)
        if line is not None and line.call is call:
            line.call = None
            for log in line.logs.values():
                log.cursor = None
            self._forget_quiet()

    def perform(self, effects: Iterable[Effect]) -> None:
        """Brings what the core decided to the calls concerned."""
        for effect in effects:
            match effect:
                case Progressed(logs):
                    self._mark(logs)
                case Opened(route, logs):
                    self._add(route, logs)
                case Released():
                    self._release(effect)
                case Moved():
                    self._move(effect)
                case Ended() | LeaseEnded():
                    pass  # an end stands in its log; of a lease's, releases tell
                case _:
                    assert_never(effect)

    def _mark(self, logs: Iterable[TokenLog]) -> None:
        news: dict[Call, list[Cursor]] = {}
        for log in logs:
            cursor = log.cursor
            if cursor is not None and not cursor.replaying:
                if cursor.call in news:
                    news[cursor.call].append(cursor)
                else:
                    news[cursor.call] = [cursor]
        for call, cursors in news.items():
            call.outbox.mark_all(cursors)
            call.wake()

    def _add(self, route: Route, logs: Iterable[TokenLog]) -> None:
        line = self._line(route)
        for log in logs:
            line.logs[log.key] = log
            if line.call is not None:
                log.cursor = Cursor(line.call, log, replaying=False)
        # A sequence is told of at once, not with its first token: a long prefill must not look like a lost attempt.
        self._mark(logs)

    def _move(self, moved: Moved) -> None:
        # For the old route it is as if it were released: whoever reads there forgets it, and learns that it lost it.
        self._remove(self._line(moved.old), moved.logs)
        self._mark_released(self._line(moved.old), moved.attempt_id)
        self._add(moved.new, moved.logs)
        self._forget_quiet()

    def _release(self, released: Released) -> None:
        # Whose an unknown attempt was, nobody here knows; its tokenizer waits for the marker all the same.
        lines = list(self._lines.values()) if released.route is None else [self._line(released.route)]
        for line in lines:
            self._remove(line, released.logs)
            self._mark_released(line, released.attempt_id)
        self._forget_quiet()

    def _remove(self, line: _Line, logs: Iterable[TokenLog]) -> None:
        for log in logs:
            del line.logs[log.key]
            if log.cursor is not None:
                log.cursor.plain = False
                log.cursor = None

    def _mark_released(self, line: _Line, attempt_id: int) -> None:
        if line.call is not None:
            line.call.released.append(attempt_id)
            line.call.wake()

    def _line(self, route: Route) -> _Line:
        return self._lines.setdefault(route, _Line())

    def _forget_quiet(self) -> None:
        if len(self._lines) <= MAX_QUIET_ROUTES:
            return
        quiet = [route for route, line in self._lines.items() if not line.logs and line.call is None]
        for route in quiet[: max(len(quiet) - MAX_QUIET_ROUTES, 0)]:
            del self._lines[route]
