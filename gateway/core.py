"""What the gateway knows of its open streams: per stream the answer's log and the caller's cursor. Pure.

A link hands in what its tokenizer sent (`StreamTable.apply`) and is given back the streams with news, whose callers it
wakes. Rows are compared with what is here already, so a replay after a reconnect costs nothing and proves itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from gateway.state import StreamEvent, StreamPhase, next_stream_phase
from services.protocol.answer import NO_OFFSETS, AnswerCursor, AnswerLog, IntegrityError, Offsets
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
from services.protocol.request import MAX_CHOICES
from services.runtime.error_tree import TailraceError
from services.runtime.trace import TraceContext

Fact = TypeVar("Fact", Finish, Usage)


class CutReason(Enum):
    """Why a tokenizer sends nothing more of an answer that has not ended; the values are the contract's."""

    UNSPECIFIED = 0
    CLAIMED = 1
    LEFT = 2
    LOST = 3


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
    cuts: Sequence[tuple[int, CutReason]] = ()


class Stream:
    """One caller's stream: its answer so far, where the caller stands, and why it was cut, if it was.

    `offsets` is what a caller who comes back has already, who does not say how many choices there are: `n` None. It is
    `measured` once that is known, at acceptance. `peer_epoch` is that of the tokenizer that accepted it last. `trace`:
    the caller's call, for whoever serves it.
    """

    __slots__ = (
        "cursor",
        "cut",
        "ended_here",
        "log",
        "marked",
        "measured",
        "peer_epoch",
        "phase",
        "request_id",
        "started",
        "tenant",
        "trace",
        "wake",
        "whole",
        "woken_at",
    )

    def __init__(
        self,
        *,
        request_id: str,
        n: int | None,
        wake: Callable[[], None],
        tenant: str = "",
        whole: bool = False,
        offsets: Offsets = NO_OFFSETS,
        trace: TraceContext | None = None,
    ) -> None:
        self.tenant = tenant
        self.trace = trace
        self.request_id = request_id
        self.phase = StreamPhase.OPENING
        self.log = AnswerLog(max(offsets, default=0) + 1 if n is None else n, offsets)
        self.measured = n is not None
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

    def attach(self, started: Started, peer_epoch: int, *, n: int, whole: bool) -> None:
        """Attach was answered, for a caller who comes back or for a stranded stream.

        Raises IntegrityError for a caller who has more choices than there are.
        """
        if self.measured:
            self.found(peer_epoch)
            return
        self.log.widen(n)
        if len(self.log.choices) > n:
            raise IntegrityError(f"offsets of {len(self.log.choices)} choices where there are {n}")
        self.measured = True
        self.whole = whole
        self.cursor = AnswerCursor(self.log, whole=whole)
        self.accept(started, peer_epoch)

    def offsets(self) -> dict[int, tuple[int, int]]:
        """How far the answer is here: where another tokenizer has to go on."""
        return {choice: (log.token_length, log.text_length) for choice, log in enumerate(self.log.choices)}

    @property
    def stranded(self) -> bool:
        """Whether no tokenizer serves it."""
        return self.phase is StreamPhase.STRANDED

    @property
    def over(self) -> bool:
        """Whether it was ended or cut off here: its tokenizer may go on, and nothing of that concerns its caller."""
        return self.ended_here or self.cut is not None

    def strand(self) -> bool:
        """Its tokenizer is lost; True when that leaves it without one, False where nothing is missing any more."""
        if self.phase is not StreamPhase.OPEN:
            return False
        self.phase = next_stream_phase(self.phase, StreamEvent.STRAND)
        return True

    def found(self, peer_epoch: int) -> None:
        """A tokenizer serves it again."""
        self.phase = next_stream_phase(self.phase, StreamEvent.FOUND)
        self.peer_epoch = peer_epoch

    def take(self) -> list[Delta | Finish | Completed]:
        """What the caller has not got yet. Raises what cut the stream once the rest has been taken."""
        events = self.cursor.take()
        if self.cut is not None and not events:
            raise self.cut
        return events

    def finish(self, finish: Finish) -> None:
        """A choice ended. Raises IntegrityError when it had ended otherwise."""
        if not self.over:
            self.log.finish(finish)

    def complete(self, usage: Usage) -> None:
        """The request ended. Raises IntegrityError when it can't have, or ended otherwise before."""
        if self.over:
            return
        if not self.log.all_finished:
            raise IntegrityError("completed before all its choices")
        if self.log.usage is not None:
            if self.log.usage != usage:
                raise IntegrityError(f"completed with {self.log.usage} and with {usage}")
            return
        self._end(usage)

    def end_here(self, reason: FinishReason, failure: Failure | None = None) -> None:
        """Ends what is open of the answer by our own decision, with what is known of its usage."""
        if self.log.usage is not None or self.cut is not None:
            return
        self.ended_here = True
        counts = [choice.token_length for choice in self.log.choices]
        for choice, log in enumerate(self.log.choices):
            if log.finish is None:
                log.finish = Finish(choice, reason, counts[choice], error=failure)
        prompt_tokens = self.started.prompt_tokens if self.started else 0
        self._end(Usage(prompt_tokens, 0, sum(counts)))

    def cut_off(self, error: TailraceError) -> None:
        """The rest can't be had: the caller gets what is here, then the error, and no end is invented."""
        if self.log.usage is None and self.cut is None:
            self.cut = error
            self.phase = next_stream_phase(self.phase, StreamEvent.END)

    def close(self) -> None:
        """The caller's side has ended."""
        self.phase = next_stream_phase(self.phase, StreamEvent.CLOSE)

    def _end(self, usage: Usage) -> None:
        self.log.complete(usage)
        self.phase = next_stream_phase(self.phase, StreamEvent.END)


@dataclass(frozen=True, slots=True)
class Broken:
    """A stream that was ended because two accounts of its output differed."""

    stream: Stream
    why: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What a batch changed: the streams whose callers have news, and those that broke (they have news too).

    `cuts` are streams of which this tokenizer sends no more; `repeated_tokens` counts what was here already.
    """

    touched: Collection[Stream]
    broken: Sequence[Broken]
    cuts: Sequence[tuple[int, Stream, CutReason]]
    repeated_tokens: int


class StreamTable:
    """The streams of one link, by the gateway's number for them there."""

    __slots__ = ("_streams", "_unmeasured")

    def __init__(self) -> None:
        self._streams: dict[int, Stream] = {}
        self._unmeasured: set[int] = set()

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[Stream]:
        return iter(self._streams.values())

    def add(self, stream_id: int, stream: Stream) -> None:
        """From now on its events are kept."""
        assert stream_id not in self._streams
        self._streams[stream_id] = stream
        if not stream.measured:
            self._unmeasured.add(stream_id)

    def discard(self, stream_id: int) -> None:
        """Its events are ignored from now on."""
        self._streams.pop(stream_id, None)
        self._unmeasured.discard(stream_id)

    def apply(self, rows: EventRows) -> Applied:
        """Appends what came; rows of streams that have ended on the caller's side are ignored."""
        touched: dict[Stream, None] = {}
        broken: list[Broken] = []
        if self._unmeasured:
            self._widen(rows)
        repeated_tokens = self._apply_deltas(rows, touched, broken)
        for stream_id, finish in rows.finishes:
            self._attempt(stream_id, Stream.finish, finish, touched, broken)
        for stream_id, usage in rows.completions:
            self._attempt(stream_id, Stream.complete, usage, touched, broken)
        cuts = [(at, self._streams[at], reason) for at, reason in rows.cuts if at in self._streams]
        return Applied(touched, broken, cuts, repeated_tokens)

    def _widen(self, rows: EventRows) -> None:
        """Events of a resumed answer may come before the number of its choices: every choice shows in them."""
        self._unmeasured = {stream_id for stream_id in self._unmeasured if not self._streams[stream_id].measured}
        choices = [*zip(rows.stream_ids, rows.choices, strict=True), *((at, end.choice) for at, end in rows.finishes)]
        for stream_id, choice in choices:
            if stream_id in self._unmeasured and choice < MAX_CHOICES:
                self._streams[stream_id].log.widen(choice + 1)

    def _apply_deltas(self, rows: EventRows, touched: dict[Stream, None], broken: list[Broken]) -> int:
        # The hot loop: a row per (stream, choice) and step. Nothing is allocated but the slice of ids.
        streams, token_ids, infos = self._streams, rows.token_ids, rows.tokens
        end = repeated_tokens = 0
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
                if not stream.log.choices[choice].append(token_offset, token_ids[start:end], text_offset, text, tokens):
                    repeated_tokens += count
            except (IntegrityError, IndexError) as error:
                if stream.over:
                    continue
                broken.append(self._break(stream_id, error))
            touched[stream] = None
        return repeated_tokens

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
            broken.append(self._break(stream_id, error))
        touched[stream] = None

    def _break(self, stream_id: int, error: Exception) -> Broken:
        why = str(error) if isinstance(error, IntegrityError) else "an event of a choice that was not asked for"
        stream = self._streams[stream_id]
        self.discard(stream_id)
        stream.end_here(FinishReason.ERROR, Failure(ErrorCode.INTEGRITY, f"the answer contradicts itself: {why}"))
        return Broken(stream, why)
