"""Puts what a route brings where it belongs: rows of text into answers, ends and markers into the ledger.

One `RouteCall` per StreamText call. The call starts every open sequence at token 0; what the answer has already is
compared and dropped. A row beyond what the answer has is a gap, which breaks the protocol: the call must end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat

from services.protocol.answer import ChoiceLog, IntegrityError
from services.protocol.events import Failure, Finish, FinishReason, StopMatch, TokenInfo
from services.runtime.trace import TraceContext
from services.tokenizer.attempts import Attempts
from services.tokenizer.effects import Effects, Progressed, Resubscribe, Wake
from services.tokenizer.entry import Attempt, Entry

MAX_GAPS = 3
"""Gaps in one attempt's stream, over several calls, after which resubscribing is given up."""


@dataclass(frozen=True, slots=True)
class TextStart:
    """A sequence begins in this call."""

    sequence: int
    attempt_id: int
    choice: int
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class Prompt:
    """A sequence's prompt has been computed."""

    sequence: int
    cached_prompt_tokens: int
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True)
class TextFinish:
    """The one finish of a sequence, with the lengths of its output in tokens and code points."""

    sequence: int
    token_offset: int
    text_offset: int
    reason: FinishReason
    stop: StopMatch | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class EngineEnd:
    """The engine ended a sequence."""

    sequence: int
    cached_prompt_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBatch:
    """One message of a route, as columns: row i is entry i of each. `token_counts` empty: one id in every row.

    `news_us`: since when the oldest of it waited to be sent, by the sender's clock; 0: not told.
    """

    starts: Sequence[TextStart] = ()
    prompts: Sequence[Prompt] = ()
    sequences: Sequence[int] = ()
    token_offsets: Sequence[int] = ()
    token_counts: Sequence[int] = ()
    token_ids: Sequence[int] = ()
    text_offsets: Sequence[int] = ()
    texts: Sequence[str] = ()
    row_tokens: dict[int, Sequence[TokenInfo]] = field(default_factory=dict)
    finishes: Sequence[TextFinish] = ()
    engine_ends: Sequence[EngineEnd] = ()
    released_attempt_ids: Sequence[int] = ()
    news_us: int = 0


class _Gap(Exception):
    """The call leaves something out, or speaks of a sequence that it did not start."""


@dataclass(slots=True, eq=False)
class _Slot:
    """Where a sequence of the call belongs."""

    attempt: Attempt
    choice: int
    entry: Entry
    log: ChoiceLog


class RouteCall:
    """One StreamText call's sequences. `repeated_tokens` were here already; `late_tokens` came after the end."""

    def __init__(self, attempts: Attempts, scheduler: str, epoch: int) -> None:
        self._attempts = attempts
        self._scheduler = scheduler
        self._epoch = epoch
        self._slots: dict[int, _Slot | None] = {}
        self._sequences: dict[int, list[int]] = {}
        self.repeated_tokens = 0
        self.late_tokens = 0

    def apply(self, batch: TextBatch, now: float) -> Effects:
        """Takes a batch in. After a gap the rest of the batch is left, and Resubscribe is the last effect."""
        effects: Effects = []
        try:
            for start in batch.starts:
                effects += self._start(start)
            for prompt in batch.prompts:
                self._prompt_computed(prompt)
            if batch.sequences:
                self._append(batch, now, effects)
            for end in batch.engine_ends:
                effects += self._engine_ended(end, now)
            for finish in batch.finishes:
                effects += self._finish(finish, now)
            for attempt_id in batch.released_attempt_ids:
                effects += self._released(attempt_id, now)
        except _Gap as gap:
            effects.append(Resubscribe(self._scheduler, str(gap)))
        return effects

    def _start(self, start: TextStart) -> Effects:
        self._sequences.setdefault(start.attempt_id, []).append(start.sequence)
        attempt = self._attempts.get(start.attempt_id)
        if attempt is None:
            # The scheduler holds what nobody here remembers: its rows are passed over.
            self._slots[start.sequence] = None
            return self._attempts.unknown(self._scheduler, start.attempt_id)
        entry = attempt.entry
        if start.choice not in attempt.choices:
            raise _Gap(f"a sequence for choice {start.choice}, which was not asked for")
        slot = _Slot(attempt, start.choice, entry, entry.log.choices[start.choice])
        # Where another attempt has taken its place, two at once must not write into one answer.
        self._slots[start.sequence] = None if attempt.abandoned or start.choice in attempt.passed_over else slot
        effects = self._attempts.accepted(attempt, self._epoch)
        attempt.in_call = True
        if start.trace is not None:
            attempt.sources.append(start.trace)
        return effects

    def _append(self, batch: TextBatch, now: float, effects: Effects) -> None:
        """The hot path: one turn per row, and nothing is made for a row but what its log keeps."""
        slots = self._slots
        dirty: dict[Entry, None] = {}
        try:
            for sequence, token_offset, ids, text_offset, text, tokens in zip(
                batch.sequences, batch.token_offsets, _ids(batch), batch.text_offsets, batch.texts, _tokens(batch),
                strict=True,
            ):  # fmt: skip
                slot = slots[sequence]
                if slot is None:
                    continue
                try:
                    if slot.log.append(token_offset, ids, text_offset, text, tokens):
                        dirty[slot.entry] = None
                    else:
                        self.repeated_tokens += len(ids)
                except IntegrityError as error:
                    if slot.entry.completed:
                        self.late_tokens += len(ids)
                    else:
                        effects += self._disagreement(slot, token_offset, text_offset, error, now)
        except KeyError as error:
            raise _Gap(f"a row of sequence {error}, which was not started") from None
        except ValueError:
            raise _Gap("columns of different lengths") from None
        finally:
            if dirty:
                effects += (Wake(dirty.keys()), _progress(dirty, now))

    def _disagreement(
        self, slot: _Slot, token_offset: int, text_offset: int, error: IntegrityError, now: float
    ) -> Effects:
        """What did not fit into an unfinished answer: a gap, or a different account."""
        if token_offset > len(slot.log.token_ids) or text_offset > slot.log.text_length:
            self._gap(slot, str(error))
        return self._attempts.spoiled(slot.attempt, str(error), now)

    def _gap(self, slot: _Slot, why: str) -> None:
        """Raises, so that the call ends and the next one starts over; returns once that has been tried too often."""
        slot.attempt.gaps += 1
        if slot.attempt.gaps <= MAX_GAPS:
            raise _Gap(why)

    def _prompt_computed(self, prompt: Prompt) -> None:
        slot = self._slot(prompt.sequence)
        if slot is not None:
            slot.attempt.cached_prompt_tokens[slot.choice] = prompt.cached_prompt_tokens
            slot.entry.prompt_infos = slot.entry.prompt_infos or prompt.tokens

    def _engine_ended(self, end: EngineEnd, now: float) -> Effects:
        slot = self._slot(end.sequence)
        if slot is None:
            return []
        return self._attempts.engine_ended(slot.attempt, slot.choice, end.cached_prompt_tokens, now)

    def _finish(self, finish: TextFinish, now: float) -> Effects:
        slot = self._slot(finish.sequence)
        if slot is None or slot.entry.completed or slot.entry.cut is not None:
            return []
        if finish.text_offset > slot.log.text_length:
            why = f"a finish at code point {finish.text_offset} after {slot.log.text_length}"
            self._gap(slot, why)
            return self._attempts.spoiled(slot.attempt, why, now)
        event = Finish(slot.choice, finish.reason, finish.token_offset, finish.stop, finish.error)
        try:
            if finish.text_offset < slot.log.text_length or finish.token_offset < len(slot.log.token_ids):
                raise IntegrityError(f"a finish at token {finish.token_offset}, before what was sent")
            return self._attempts.finish(slot.attempt, event, now)
        except IntegrityError as error:
            return self._attempts.spoiled(slot.attempt, str(error), now)

    def _released(self, attempt_id: int, now: float) -> Effects:
        for sequence in self._sequences.pop(attempt_id, ()):
            del self._slots[sequence]
        attempt = self._attempts.get(attempt_id)
        return [] if attempt is None else self._attempts.marker_seen(attempt, now)

    def _slot(self, sequence: int) -> _Slot | None:
        try:
            return self._slots[sequence]
        except KeyError:
            raise _Gap(f"an end of sequence {sequence}, which was not started") from None


def _progress(entries: Iterable[Entry], now: float) -> Progressed:
    """Moves the entries' clocks on. Entries of one step share their intervals, so that few have to be observed."""
    to_first: list[float] = []
    since: dict[float, int] = {}
    for entry in entries:
        if entry.has_output:
            since[entry.progress_at] = since.get(entry.progress_at, 0) + 1
        else:
            entry.has_output = True
            entry.first_output_at = now
            to_first.append(now - entry.opened_at)
        entry.progress_at = now
    return Progressed(to_first, {now - moment: count for moment, count in since.items()})


def _ids(batch: TextBatch) -> Iterable[Sequence[int]]:
    """Each row's ids."""
    return _cut(batch.token_ids, batch.token_counts) if batch.token_counts else zip(batch.token_ids, strict=True)


def _cut(ids: Sequence[int], counts: Sequence[int]) -> Iterator[Sequence[int]]:
    start = 0
    for count in counts:
        yield ids[start : start + count]
        start += count


def _tokens(batch: TextBatch) -> Iterable[Sequence[TokenInfo]]:
    """Each row's token-level output."""
    if not batch.row_tokens:
        return repeat((), len(batch.sequences))
    return (batch.row_tokens.get(row, ()) for row in range(len(batch.sequences)))
