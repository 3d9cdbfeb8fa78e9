"""One answer as its caller has it, over any number of streams, held against what it must be at every event."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.protocol.events import Completed, Delta, ErrorCode, Event, Finish, FinishReason, Started
from tests.simulation.expectation import Expected, expected_of
from tests.simulation.request import Request

NATURAL = (FinishReason.STOP, FinishReason.LENGTH)


class BrokenPromise(Exception):
    """The answer is not what it must be."""


@dataclass
class Choice:
    """What has come of one choice."""

    expected: Expected
    ids: list[int] = field(default_factory=list)
    text: str = ""
    infos: int = 0
    finish: Finish | None = None


class Answer:
    """Takes every event of every stream; `begin_stream` before each one. Raises BrokenPromise."""

    def __init__(self, request: Request, *, echo: bool) -> None:
        self.request = request
        self.started: Started | None = None
        self.completed: Completed | None = None
        self.choices: list[Choice] = []
        self._echo = echo
        self._begun = False
        self._over = False
        self._finished: set[int] = set()

    def begin_stream(self) -> None:
        """A new stream of the same answer: Started comes again, and so does each Finish."""
        self._begun = self._over = False
        self._finished.clear()

    @property
    def finishes(self) -> list[Finish]:
        """Of the choices that have one."""
        return [choice.finish for choice in self.choices if choice.finish is not None]

    def take(self, event: Event) -> None:
        """The next event of the stream."""
        _promise(not self._over, "nothing comes after Completed")
        _promise(self._begun != isinstance(event, Started), "Started comes first and once")
        match event:
            case Started():
                self._start(event)
            case Delta():
                self._more(self.choices[event.choice], event)
            case Finish():
                self._finish(self.choices[event.choice], event)
            case Completed():
                self._complete(event)

    def end_of_stream(self) -> None:
        """The stream ended with status OK."""
        _promise(self._over, "a stream ends well only after Completed")

    def _start(self, started: Started) -> None:
        self._begun = True
        if self.started is None:
            self.started = started
            self.choices = [
                Choice(expected_of(self.request, started.seed, number, echo=self._echo))
                for number in range(self.request.n)
            ]
        _promise(self.started == started, "a resumed answer is the same answer")

    def _more(self, choice: Choice, delta: Delta) -> None:
        _promise(delta.choice not in self._finished, "no text comes after a choice's Finish")
        _promise(delta.token_ids or delta.text, "a delta says something")
        choice.ids += delta.token_ids
        choice.text += delta.text
        choice.infos += len(delta.tokens)
        _promise(delta.next_token_offset == len(choice.ids), "token offsets are contiguous")
        _promise(delta.next_text_offset == len(choice.text), "text offsets are contiguous")
        expected = choice.expected
        _promise(choice.ids == expected.ids[: len(choice.ids)], "the ids are those of the undisturbed run")
        if not expected.whole.text.startswith(choice.text):
            # Text that was held back goes out at an early end.
            self._check_early(choice, FinishReason.ABORTED)
        if self.request.logprobs:
            _promise(choice.infos == len(choice.ids), "there is a TokenInfo for each id")

    def _finish(self, choice: Choice, finish: Finish) -> None:
        _promise(finish.choice not in self._finished, "a choice has one Finish")
        self._finished.add(finish.choice)
        _promise(choice.finish in (None, finish), "a Finish that comes again is the same")
        choice.finish = finish
        _promise(finish.output_tokens == len(choice.ids), "Finish counts the choice's tokens")
        whole = choice.expected.whole
        if finish.reason in NATURAL:
            _promise((finish.reason, finish.stop) == whole.finish, "it ends as the undisturbed run does")
            _promise(choice.ids == whole.ids and choice.text == whole.text, "a natural end has the whole text")
        else:
            self._check_early(choice, finish.reason)
        failed = finish.error is not None
        _promise(failed == (finish.reason is FinishReason.ERROR), "ERROR says what happened, and nothing else does")
        _promise(finish.error is None or finish.error.code is not ErrorCode.INTEGRITY, "two accounts never differ")

    def _check_early(self, choice: Choice, reason: FinishReason) -> None:
        """What was held back goes out or stays, as the end was the engine's or ours."""
        so_far, flushed = choice.expected.broken_off(len(choice.ids), reason)
        fits = len(so_far) <= len(choice.text) and flushed.startswith(choice.text)
        _promise(fits, "the text is the text of the ids")

    def _complete(self, completed: Completed) -> None:
        self._over = True
        _promise(self._finished == set(range(self.request.n)), "Completed comes after every Finish")
        _promise(self.completed in (None, completed), "a Completed that comes again is the same")
        self.completed = completed
        tokens = sum(finish.output_tokens for finish in self.finishes)
        _promise(completed.usage.output_tokens == tokens, "usage counts what was sent")
        _promise(completed.usage.prompt_tokens == len(self.request.prompt_ids), "usage counts the prompt once")


def _promise(kept: object, what: str) -> None:
    if not kept:
        raise BrokenPromise(what)
