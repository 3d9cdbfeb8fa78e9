"""Bugs that somebody could write, each planted into one function of the real code: the simulation must find all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

from gateway.releases import Releases, StreamEnd
from services.protocol.answer import AnswerCursor, ChoiceLog
from services.protocol.events import FinishReason
from services.protocol.outbox import Outbox
from services.scheduler import ownership
from services.scheduler.admission import Tombstones
from services.scheduler.core import SchedulerCore
from services.scheduler.effects import Effect
from services.scheduler.kv.pool import BlockPool
from services.scheduler.leases import Leases
from services.scheduler.publisher import Publisher
from services.scheduler.submission import Route
from services.tokenizer.attempts import Attempts
from services.tokenizer.core import Ledger
from services.tokenizer.effects import Effects
from services.tokenizer.entry import Attempt, Entry
from services.tokenizer.failover import Failover
from services.tokenizer.gateway_streams import Gateway, GatewayStream
from tests.simulation.story import FOLDER


@dataclass(frozen=True)
class Bug:
    """A bug, as what it does wrong; `owner.name` is replaced by what `spoil` makes of the right one.

    `story`: a course of things in which it does harm, or ends otherwise than it says.
    """

    what: str
    owner: Any
    name: str
    spoil: Callable[[Any], Any]
    story: str

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Meanwhile the code has it."""
        right = self.owner.__dict__[self.name]
        with patch.object(self.owner, self.name, self.spoil(right)):
            yield


def _does_nothing(_: Any) -> Any:
    def spoiled(*_: object, **__: object) -> list[object]:
        return []

    return spoiled


def _appends_what_it_has(_: Any) -> Any:
    def beyond(
        self: ChoiceLog, offset: int, ids: list[int], text_offset: int, text: str, tokens: list[Any]
    ) -> tuple[list[int], str, list[Any]]:
        return ids, text, tokens

    return beyond


def _is_due_at_the_first_token(_: Any) -> Any:
    return property(lambda self: self.phase.name in ("SUBMITTING", "RUNNING") and self.entry.has_output)


def _aborts_by_label(right: Any) -> Any:
    def abort(
        self: SchedulerCore, attempt_ids: Iterable[int], reason: FinishReason, now: float, sender: Route | None = None
    ) -> list[Effect]:
        asked = list(attempt_ids)
        labels = {self.attempts[a].submission.request_id for a in asked if a in self.attempts}
        same = [a for a, attempt in self.attempts.items() if attempt.submission.request_id in labels]
        return right(self, [*asked, *(a for a in same if a not in asked)], reason, now, sender)  # type: ignore[no-any-return]  # the right one's

    return abort


def _evicts_the_oldest(_: Any) -> Any:
    def check_room(self: Ledger, request: object) -> None:
        live = [entry for entry in self if not entry.completed]
        if len(live) >= self._max_open:
            self._book.end(live[0], FinishReason.ABORTED, live[0].progress_at)
            for reader in live[0].readers:
                reader.mark()

    return check_room


def _grants_every_claim(_: Any) -> Any:
    return lambda request, claim: request.fence + 1


def _is_never(_: Any) -> Any:
    return property(lambda self: False)


def _releases_for_anybody(right: Any) -> Any:
    def release(self: SchedulerCore, attempt_ids: Iterable[int], now: float, sender: object = None) -> list[Effect]:
        return right(self, attempt_ids, now)  # type: ignore[no-any-return]  # the right one's

    return release


def _ends_as_it_stands(_: Any) -> Any:
    def lost(self: Failover, attempt: Attempt, now: float) -> Effects:
        return self._book.end(attempt.entry, FinishReason.LENGTH, now)

    return lost


def _takes_every_submit_for_a_new_one(right: Any) -> Any:
    def submit(self: SchedulerCore, submission: Any, now: float) -> list[Effect]:
        if submission.attempt_id in self.attempts:
            submission = replace(submission, attempt_id=submission.attempt_id ^ 1)
        return right(self, submission, now)  # type: ignore[no-any-return]  # the right one's

    return submit


def _tells_of_delivered_ones_alone(right: Any) -> Any:
    def add(self: Releases, stream_id: int, end: StreamEnd) -> None:
        if end is StreamEnd.DELIVERED:
            right(self, stream_id, end)

    return add


def _forgets_one_that_is_marked_again(_: Any) -> Any:
    def mark(self: Outbox[Any], key: Any) -> None:
        if key not in self._live:
            self._live[key] = None
        else:
            del self._live[key]

    return mark


def _ignores_offsets(right: Any) -> Any:
    def starts_over(self: AnswerCursor, log: Any, *, whole: bool = False, offsets: Any = None) -> None:
        right(self, log, whole=whole)

    return starts_over


TWO_CLAIM = (FOLDER / "09-two-claim-one-request-and-one-has-all-of-it.txt").read_text()
ONE_ASKS = "0.50 alice asks gateway-1 for 20 tokens"
ONE_LEAVES = "0.50 alice asks gateway-1 for 60 tokens, leaves after 0.3 s"
A_SCHEDULER_DIES = """
0.50 alice asks gateway-1 for 60 tokens
0.90 scheduler-1 is killed for 0.5 s
"""
A_SUBMIT_COMES_LATE = """
0.40 every Submit to a scheduler comes late
0.50 alice asks tokenizer-1 for 4 tokens
0.60 bob asks tokenizer-1 for 4 tokens
0.70 carol asks tokenizer-1 for 4 tokens
"""

BUGS = (
    Bug(
        "a replayed row is appended without a look at where it stands", ChoiceLog, "_beyond", _appends_what_it_has,
        "0.50 alice asks gateway-1 for 40 tokens\n0.90 tokenizer-1 and detokenizer-1 are cut",
    ),
    Bug("a request is released at its first token", Attempt, "release_is_due", _is_due_at_the_first_token, ONE_ASKS),
    Bug(
        "an abort goes by the label", SchedulerCore, "abort", _aborts_by_label,
        """
        with steps of 60 ms
        0.45 every Abort to a scheduler comes late
        0.50 alice asks tokenizer-1 for 60 tokens as "x", aborts after 0.2 s
        1.20 bob asks tokenizer-1 for 90 tokens of "Another" as "x"
        """,
    ),
    Bug(
        "a tokenizer that wakes up may still release what was claimed from it",
        SchedulerCore, "release", _releases_for_anybody,
        """
        with 2 tokenizers, steps of 60 ms
        0.50 alice asks gateway-1 for 90 tokens without failover
        0.90 tokenizer-1 is paused for 4.0 s
        """,
    ),
    Bug("a claim is granted whatever fence it brings", ownership, "_granted", _grants_every_claim, TWO_CLAIM),
    Bug(
        "who lost a request at one scheduler releases it at the others", Entry, "is_handed_over", _is_never, TWO_CLAIM,
    ),
    Bug("a released attempt's log stays in its route", Publisher, "_remove", _does_nothing, ONE_ASKS),
    Bug("a released attempt has no tombstone", Tombstones, "add", _does_nothing, A_SUBMIT_COMES_LATE),
    Bug("a retried Submit is a second attempt", SchedulerCore, "submit", _takes_every_submit_for_a_new_one,
        A_SUBMIT_COMES_LATE.replace("4 tokens", "90 tokens")),
    Bug(
        "a full ledger evicts its oldest request", Ledger, "check_room", _evicts_the_oldest,
        """
        with room for 2 open, steps of 30 ms
        0.50 alice asks tokenizer-1 for 60 tokens
        0.60 bob asks tokenizer-1 for 60 tokens
        0.70 carol asks tokenizer-1 for 60 tokens
        """,
    ),
    Bug(
        "a lease never ends", Leases, "_start_grace", _does_nothing,
        "0.50 alice asks tokenizer-1 for 60 tokens\n0.90 tokenizer-1 is killed for 0.5 s",
    ),
    Bug("an attempt's loss ends the answer", Failover, "lost", _ends_as_it_stands, A_SCHEDULER_DIES),
    Bug("a lost attempt is not missed", Attempts, "lose", _does_nothing, A_SCHEDULER_DIES),
    Bug(
        "a gateway's new call goes on where the old one stood", GatewayStream, "rewind", _does_nothing,
        """
        with steps of 10 ms
        0.50 alice asks gateway-1 for 90 tokens
        0.60 bob asks gateway-1 for 90 tokens
        0.80 gateway-1 and tokenizer-1 are cut
        1.10 gateway-1 and tokenizer-1 are cut
        """,
    ),
    Bug(
        "a caller who comes back is given everything again", AnswerCursor, "__init__", _ignores_offsets,
        "0.50 alice asks tokenizer-1 for 60 tokens, detached, leaves after 0.4 s, is back after 0.4 s",
    ),
    Bug(
        "a stream whose caller left early may still be opened", Gateway, "bury", _does_nothing,
        """
        0.40 every Open to a tokenizer comes late
        0.50 alice asks gateway-1 for 4 tokens, leaves after 0.1 s
        0.60 bob asks gateway-1 for 4 tokens, leaves after 0.1 s
        """,
    ),
    Bug("a gateway tells of delivered answers alone", Releases, "add", _tells_of_delivered_ones_alone, ONE_LEAVES),
    Bug("a departed caller's request runs on", Ledger, "left", _does_nothing, ONE_LEAVES),
    Bug("news on top of news cancels it", Outbox, "mark", _forgets_one_that_is_marked_again, ONE_ASKS),
    Bug("an ended sequence keeps its blocks", BlockPool, "give_back", _does_nothing, ONE_ASKS),
)  # fmt: skip
