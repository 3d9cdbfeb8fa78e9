"""The law of an answer's stream, checked as it comes; offsets make a lost, doubled or reordered delta visible.

It holds over any number of connections: after a cut the stream goes on where it stood, is the same request's, and says
again only that it has started and which choices have ended, in the same words.
"""

from __future__ import annotations

from collections.abc import Sequence

from tailrace.client.errors import LawBroken, StreamCut
from tailrace.client.events import Completed, Delta, Event, Finish, Started
from tailrace.client.handle import Handle


class StreamLaw:
    """Follows one stream whose reader stands at `offsets`, one per choice; `check` every event, then `check_end`."""

    __slots__ = ("_awaits_start", "_completed", "_finishes", "_repeatable", "_started", "offsets")

    def __init__(self, offsets: Sequence[tuple[int, int]]) -> None:
        self.offsets = list(offsets)
        self._finishes: list[Finish | None] = [None] * len(self.offsets)
        self._repeatable: set[int] = set()
        self._started: Started | None = None
        self._awaits_start = True
        self._completed = False

    @property
    def started(self) -> bool:
        """Whether the request was accepted."""
        return self._started is not None

    @property
    def handle(self) -> Handle | None:
        """Where the reader stands; None before the request was accepted."""
        if self._started is None:
            return None
        return Handle(self._started.request_id, self._started.resume_token, tuple(self.offsets))

    def cut(self) -> None:
        """The connection is lost; the next event is another one's first."""
        self._awaits_start = True
        self._repeatable = {choice for choice, finish in enumerate(self._finishes) if finish is not None}

    def check(self, event: Event) -> bool:
        """Takes the next event; whether it is new to the reader. Raises LawBroken."""
        _require(not self._completed, "an event after Completed")
        _require(self._awaits_start == isinstance(event, Started), "Started must come first, and once")
        match event:
            case Delta():
                self._check_delta(event)
            case Finish():
                return self._check_finish(event)
            case Completed():
                _require(None not in self._finishes, "Completed before every choice had its Finish")
                self._completed = True
            case Started():
                return self._check_started(event)
        return True

    def check_end(self) -> None:
        """Takes the stream's end. Raises StreamCut unless Completed came."""
        if not self._completed:
            raise StreamCut("the stream ended without Completed; the answer is not whole")

    def _check_started(self, started: Started) -> bool:
        new = self._started is None
        _require(new or started == self._started, "a stream that was taken up again is another request's")
        self._started, self._awaits_start = started, False
        return new

    def _check_delta(self, delta: Delta) -> None:
        self._check_open(delta.choice)
        tokens, text = self.offsets[delta.choice]
        after = (tokens + len(delta.token_ids), text + len(delta.text))
        told = (delta.next_token_offset, delta.next_text_offset)
        _require(told == after, f"choice {delta.choice}: offsets {told} after {tokens}, {text} should be {after}")
        _require(not delta.tokens or len(delta.tokens) == len(delta.token_ids), "one TokenInfo per id")
        self.offsets[delta.choice] = after

    def _check_finish(self, finish: Finish) -> bool:
        if finish.choice in self._repeatable:
            self._repeatable.remove(finish.choice)
            _require(finish == self._finishes[finish.choice], f"choice {finish.choice} ended otherwise before")
            return False
        self._check_open(finish.choice)
        tokens, _ = self.offsets[finish.choice]
        _require(
            finish.output_tokens == tokens, f"choice {finish.choice}: {tokens} of {finish.output_tokens} tokens came"
        )
        self._finishes[finish.choice] = finish
        return True

    def _check_open(self, choice: int) -> None:
        _require(choice < len(self._finishes), f"choice {choice} was not asked for")
        _require(self._finishes[choice] is None, f"choice {choice} went on after its Finish")


def _require(lawful: bool, what: str) -> None:
    if not lawful:
        raise LawBroken(what)
