"""One StreamTokens call: its cursors, and what it takes next, in columns, everything merged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from services.protocol.outbox import Outbox
from services.protocol.sender import MAX_BATCH_BYTES
from services.runtime.error_tree import Superseded, Unavailable
from services.runtime.trace import STATE_CHARS_MAX
from services.scheduler.engine.api import Logprobs
from services.scheduler.submission import Route
from services.scheduler.token_log import TokenLog

REPLAY_SLICE_BYTES = 64 << 10

STOPPING = "SCHEDULER_STOPPING"
"""The reason with which every stream ends when this process does: what it held goes on elsewhere, at once."""

# Upper bounds on the wire, so that a batch stays below its limit whatever is in it.
_ID_BYTES = 5
_ROW_BYTES = 40
_END_BYTES = 64
_START_BYTES = 64
_TRACE_BYTES = 64 + STATE_CHARS_MAX


@dataclass(slots=True, eq=False)
class Rows:
    """One message's content as columns: row i has `token_counts[i]` of `token_ids`, for sequence `sequences[i]`."""

    starts: list[tuple[int, TokenLog]] = field(default_factory=list)
    sequences: list[int] = field(default_factory=list)
    token_offsets: list[int] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[tuple[int, list[Logprobs]]] = field(default_factory=list)
    prompts: list[tuple[int, TokenLog]] = field(default_factory=list)
    ends: list[tuple[int, TokenLog]] = field(default_factory=list)
    released: list[int] = field(default_factory=list)


class Cursor:
    """Where one call stands in one log. `plain`: told of the prompt, and its rows need ids alone."""

    __slots__ = ("call", "end_sent", "log", "number", "offset", "plain", "replaying", "started")

    def __init__(self, call: Call, log: TokenLog, *, replaying: bool) -> None:
        self.call = call
        self.log = log
        self.number = 0
        self.offset = 0
        self.started = self.end_sent = self.plain = False
        self.replaying = replaying

    @property
    def behind(self) -> bool:
        """Whether its call has not been given everything yet."""
        log = self.log
        if log.cursor is not self:
            return False  # released, or gone to another route
        return not self.started or self.offset < len(log.ids) or (log.end is not None and not self.end_sent)

    def add_to(self, rows: Rows, budget: int) -> int:
        """Adds what is new, about `budget` bytes of it (at least a token); returns the bytes."""
        if not self.behind:
            return 0
        size = 0 if self.started else self._add_start(rows)
        if self.offset < len(self.log.ids):
            size += self._add_row(rows, budget - size)
        if self.log.end is not None and self.offset == len(self.log.ids):
            rows.ends.append((self.number, self.log))
            self.end_sent = True
            size += _END_BYTES
        return size

    def _add_start(self, rows: Rows) -> int:
        self.started = True
        self.number = self.call.next_number()
        rows.starts.append((self.number, self.log))
        traced = 0 if self.log.trace is None else _TRACE_BYTES
        return _START_BYTES + traced + sum(4 * len(stop) + 8 for stop in self.log.text.stop)

    def _add_row(self, rows: Rows, budget: int) -> int:
        log, start = self.log, self.offset
        if not start:
            rows.prompts.append((self.number, log))
            self.plain = log.logprobs is None
        per_token = _ID_BYTES if log.logprobs is None else _ID_BYTES + _logprobs_bytes(log.logprobs[start])
        end = min(len(log.ids), start + max((budget - _ROW_BYTES) // per_token, 1))
        if log.logprobs is not None:
            rows.logprobs.append((len(rows.sequences), log.logprobs[start:end]))
        rows.sequences.append(self.number)
        rows.token_offsets.append(start)
        rows.token_counts.append(end - start)
        rows.token_ids.extend(log.ids[start:end])
        self.offset = end
        return _ROW_BYTES + per_token * (end - start)


class Call:
    """One StreamTokens call of a route. `wake` is set by whoever sends."""

    def __init__(self, route: Route, generation: int) -> None:
        self.route = route
        self.generation = generation
        self.wake: Callable[[], None] = _nobody
        self.superseded = self.closing = False
        self.outbox: Outbox[Cursor] = Outbox()
        self.released: list[int] = []
        self._rest: Cursor | None = None
        self._numbers = 0

    @property
    def pending(self) -> bool:
        """Whether there is something to take."""
        return bool(self.outbox or self.released or self._rest)

    def next_number(self) -> int:
        """A sequence number that this call never used before."""
        self._numbers += 1
        return self._numbers

    def take(self) -> Rows | None:
        """Everything new up to the message's bound, live sequences first; None for nothing.

        Raises what the call ends with: Superseded at once, Unavailable when this process stops and all was taken.
        """
        if self.superseded:
            raise Superseded(f"a newer call took over the route after generation {self.generation}")
        if not self.pending:
            if self.closing:
                raise Unavailable("the scheduler stops", reason=STOPPING)
            return None
        rows = Rows()
        self._take_live(rows)
        self._take_replay(rows)
        rows.released, self.released = self.released, []
        return rows

    def _take_live(self, rows: Rows) -> None:
        """The hot loop of the return path's first hop: once per sequence and step, mostly one id each."""
        cursors, budget = self.outbox.take_live(), MAX_BATCH_BYTES
        sequences, offsets, counts, ids = rows.sequences, rows.token_offsets, rows.token_counts, rows.token_ids
        for index, cursor in enumerate(cursors):
            log, offset = cursor.log, cursor.offset
            if cursor.plain and log.end is None and len(log.ids) == offset + 1:
                sequences.append(cursor.number)
                offsets.append(offset)
                counts.append(1)
                ids.append(log.ids[offset])
                cursor.offset = offset + 1
                continue
            budget -= cursor.add_to(rows, budget)
            if budget <= 0 or cursor.behind:
                self.outbox.mark_all(rest for rest in cursors[index:] if rest.behind)
                return

    def _take_replay(self, rows: Rows) -> None:
        budget = REPLAY_SLICE_BYTES
        while budget > 0:
            cursor, self._rest = self._rest or self.outbox.take_replay(), None
            if cursor is None:
                return
            budget -= cursor.add_to(rows, budget)
            if cursor.behind:
                self._rest = cursor
            else:
                cursor.replaying = False


def _logprobs_bytes(one: Logprobs) -> int:
    return 20 + 9 * len(one.top_ids)


def _nobody() -> None:
    """Nobody sends yet: what is marked meanwhile is taken by the sender's first look."""
