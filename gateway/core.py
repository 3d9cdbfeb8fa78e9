"""What the gateway knows of its open streams: per stream the answer's log and the caller's cursor. Pure.

A link hands in what its tokenizer sent (`StreamTable.apply`) and is given back the streams with news, whose callers it
wakes. Rows are compared with what is here already, so a replay after a reconnect costs nothing and proves itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.state import StreamEvent, StreamPhase, next_stream_phase
from services.protocol.answer import AnswerCursor, AnswerLog, IntegrityError
from services.protocol.events import (
    Completed,
    Delta,
    ErrorCode,
    Failure,
    Finish,
    FinishReason,
    Started,
    TokenInfo,
    Usage,
)
from services.runtime.error_tree import TailraceError

Fact = TypeVar("Fact", Finish, Usage)


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRows:
    """One batch of a tokenizer's events as columns, a row per (stream, choice); the rest is sparse.

    `token_ids` holds the ids of all rows, joined; `tokens` maps a row's number to its token-level output.
    """

    stream_ids: Sequence[int] = ()
    choices: Sequence[int] = ()
    token_offsets: Sequence[int] = ()
    token_counts: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    text_offsets: Sequence[int] = ()
    texts: Sequence[str] = ()
    tokens: Mapping[int, Sequence[TokenInfo]] = field(default_factory=dict)
    finishes: Sequence[tuple[int, Finish]] = ()
    completions: Sequence[tuple[int, Usage]] = ()


class Stream:
    """One caller's stream: its answer so far, where the caller stands, and why it was cut, if it was."""

    __slots__ = (
        "cursor",
        "cut",
        "ended_here",
        "log",
        "marked",
        "peer_epoch",
        "phase",
        "request_id",
        "started",
        "stream_id",
        "wake",
        "whole",
        "woken_at",
    )

    def __init__(self, stream_id: int, *, request_id: str, n: int, whole: bool, wake: Callable[[], None]) -> None:
        self.stream_id = stream_id
        self.request_id = request_id
        self.phase = StreamPhase.OPENING
        self.log = AnswerLog(n)
        self.cursor = AnswerCursor(self.log, whole=whole)
        self.started: Started | None = None
        self.peer_epoch = 0  # of the tokenizer that accepted it
        self.cut: TailraceError | None = None
        self.ended_here = False  # its end is ours, the tokenizer does not know of it
        self.whole = whole
        self.wake = wake
        self.marked = False  # has news and waits to be woken
        self.woken_at = 0.0

    def accept(self, started: Started, peer_epoch: int) -> None:
        """Open was answered."""
        self.phase = next_stream_phase(self.phase, StreamEvent.ACCEPTED)
        self.started, self.request_id, self.peer_epoch = started, started.request_id, peer_epoch

    def take(self) -> list[Delta | Finish | Completed]:
        """What the caller has not got yet. Raises what cut the stream once the rest has been taken."""
        events = self.cursor.take()
        if self.cut is not None and not events:
            raise self.cut
        return events

    def finish(self, finish: Finish) -> None:
        """A choice ended. Raises IntegrityError when it had ended otherwise."""
        self.log.finish(finish)

    def complete(self, usage: Usage) -> None:
        """The request ended. Raises IntegrityError when it can't have, or ended otherwise before."""
        if not self.log.all_finished:
            raise IntegrityError("completed before all its choices")
        if self.log.usage is not None:
            if self.log.usage != usage:
                raise IntegrityError(f"completed with {self.log.usage} and with {usage}")
            return
        self.log.complete(usage)
        self.phase = next_stream_phase(self.phase, StreamEvent.END)

    def end_here(self, reason: FinishReason, failure: Failure | None = None) -> None:
        """Ends what is open of the answer by our own decision, with what is known of its usage."""
        if self.log.usage is not None or self.cut is not None:
            return
        self.ended_here = True
        counts = [len(choice.token_ids) for choice in self.log.choices]
        for choice, log in enumerate(self.log.choices):
            if log.finish is None:
                log.finish = Finish(choice, reason, counts[choice], error=failure)
        prompt_tokens = self.started.prompt_tokens if self.started else 0
        self.complete(Usage(prompt_tokens, 0, sum(counts)))

    def cut_off(self, error: TailraceError) -> None:
        """The rest can't be had: the caller gets what is here, then the error, and no end is invented."""
        if self.log.usage is None and self.cut is None:
            self.cut = error
            self.phase = next_stream_phase(self.phase, StreamEvent.END)

    def close(self) -> None:
        """The caller's side has ended."""
        self.phase = next_stream_phase(self.phase, StreamEvent.CLOSE)


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream that was ended because two accounts of its output differed."""

    stream: Stream
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What a batch changed: the streams whose callers have news, and those that broke (they have news too)."""

    touched: Collection[Stream]
    broken: Sequence[Broken]


class StreamTable:
    """The open streams of one link, by the gateway's number for them."""

    __slots__ = ("_streams",)

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def add(self, stream: Stream) -> None:
        """From now on its events are kept."""
        assert stream.stream_id not in self._streams
        self._streams[stream.stream_id] = stream

    def discard(self, stream: Stream) -> None:
        """Its events are ignored from now on."""
        self._streams.pop(stream.stream_id, None)

    def apply(self, rows: EventRows) -> Applied:
        """Appends what came; rows of streams that have ended on the caller's side are ignored."""
        touched: dict[Stream, None] = {}
        broken: list[Broken] = []
        self._apply_deltas(rows, touched, broken)
        for stream_id, finish in rows.finishes:
            self._attempt(stream_id, Stream.finish, finish, touched, broken)
        for stream_id, usage in rows.completions:
            self._attempt(stream_id, Stream.complete, usage, touched, broken)
        return Applied(touched, broken)

    def _apply_deltas(self, rows: EventRows, touched: dict[Stream, None], broken: list[Broken]) -> None:
        # The hot loop: a row per (stream, choice) and step. Nothing is allocated but the slice of ids.
        streams, token_ids, infos = self._streams, rows.token_ids, rows.tokens
        end = 0
        for row, (stream_id, choice, token_offset, count, text_offset, text) in enumerate(
            zip(
                rows.stream_ids,
                rows.choices,
                rows.token_offsets,
                rows.token_counts,
                rows.text_offsets,
                rows.texts,
                strict=True,
            )
        ):
            start, end = end, end + count
            stream = streams.get(stream_id)
            if stream is None:
                continue
            tokens = infos.get(row, ()) if infos else ()
            try:
                stream.log.choices[choice].append(token_offset, token_ids[start:end], text_offset, text, tokens)
            except (IntegrityError, IndexError) as error:
                broken.append(self._break(stream, error))
            touched[stream] = None

    def _attempt(
        self,
        stream_id: int,
        change: Callable[[Stream, Fact], None],
        fact: Fact,
        touched: dict[Stream, None],
        broken: list[Broken],
    ) -> None:
        stream = self._streams.get(stream_id)
        if stream is None:
            return
        try:
            change(stream, fact)
        except (IntegrityError, IndexError) as error:
            broken.append(self._break(stream, error))
        touched[stream] = None

    def _break(self, stream: Stream, error: Exception) -> Broken:
        why = str(error) if isinstance(error, IntegrityError) else "an event of a choice that was not asked for"
        self.discard(stream)
        stream.end_here(FinishReason.ERROR, Failure(ErrorCode.INTEGRITY, f"the answer contradicts itself: {why}"))
        return Broken(stream, why)
