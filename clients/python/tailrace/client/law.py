"""The law of an answer's stream, checked as it comes; offsets make a lost, doubled or reordered delta visible."""

from __future__ import annotations

from tailrace.client.errors import LawBroken, StreamCut
from tailrace.client.events import Completed, Delta, Event, Finish, Started


class StreamLaw:
    """Follows one stream of `n` choices; `check` every event, then `check_end`."""

    __slots__ = ("_completed", "_finished", "_offsets", "_started")

    def __init__(self, n: int) -> None:
        self._offsets = [(0, 0)] * n
        self._finished = [False] * n
        self._started = self._completed = False

    @property
    def started(self) -> bool:
        """Whether the request was accepted."""
        return self._started

    def check(self, event: Event) -> None:
        """Takes the next event. Raises LawBroken."""
        _require(not self._completed, "an event after Completed")
        _require(self._started != isinstance(event, Started), "Started must come first, and once")
        match event:
            case Delta():
                self._check_delta(event)
            case Finish():
                self._check_finish(event)
            case Completed():
                _require(all(self._finished), "Completed before every choice had its Finish")
                self._completed = True
            case Started():
                self._started = True

    def check_end(self) -> None:
        """Takes the stream's end. Raises StreamCut unless Completed came."""
        if not self._completed:
            raise StreamCut("the stream ended without Completed; the answer is not whole")

    def _check_delta(self, delta: Delta) -> None:
        self._check_open(delta.choice)
        tokens, text = self._offsets[delta.choice]
        after = (tokens + len(delta.token_ids), text + len(delta.text))
        told = (delta.next_token_offset, delta.next_text_offset)
        _require(told == after, f"choice {delta.choice}: offsets {told} after {tokens}, {text} should be {after}")
        _require(not delta.tokens or len(delta.tokens) == len(delta.token_ids), "one TokenInfo per id")
        self._offsets[delta.choice] = after

    def _check_finish(self, finish: Finish) -> None:
        self._check_open(finish.choice)
        tokens, _ = self._offsets[finish.choice]
        _require(
            finish.output_tokens == tokens, f"choice {finish.choice}: {tokens} of {finish.output_tokens} tokens came"
        )
        self._finished[finish.choice] = True

    def _check_open(self, choice: int) -> None:
        _require(choice < len(self._finished), f"choice {choice} was not asked for")
        _require(not self._finished[choice], f"choice {choice} went on after its Finish")


def _require(lawful: bool, what: str) -> None:
    if not lawful:
        raise LawBroken(what)
