"""An answer that isn't streamed: the same events, gathered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gateway.openai.chunks import finish_reason, stop_reason
from gateway.openai.echo import NOTHING, Echo
from gateway.openai.errors import failure_of
from gateway.openai.form import Form
from services.protocol.events import Completed, Delta, Finish, TokenInfo, Usage
from services.protocol.generation import Answer


class WholeAnswer:
    """Gathers one answer; its choices are numbered from `first_choice`, and each begins with `echo`."""

    def __init__(self, form: Form, *, first_choice: int, n: int, logprobs: bool, echo: Echo = NOTHING) -> None:
        self.usage: Usage | None = None
        self._form = form
        self._first_choice = first_choice
        self._logprobs = logprobs
        self._echo = echo
        self._texts: list[list[str]] = [[] for _ in range(n)]
        self._tokens: list[list[TokenInfo]] = [[] for _ in range(n)]
        self._finishes: dict[int, Finish] = {}

    async def gather(self, answer: Answer) -> None:
        """Reads the answer to its end. Raises the failure of the first choice that did not end cleanly."""
        async for events in answer.batches():
            for event in events:
                self._add(event)

    def choices(self) -> list[dict[str, Any]]:
        """The choices, once the answer is there."""
        return [self._choice(choice) for choice in range(len(self._texts))]

    def _add(self, event: Delta | Finish | Completed) -> None:
        match event:
            case Delta():
                self._texts[event.choice].append(event.text)
                self._tokens[event.choice] += event.tokens
            case Finish():
                if failure := failure_of(event):
                    raise failure
                self._finishes[event.choice] = event
            case Completed(usage):
                self.usage = usage
                self._echo = replace(self._echo, tokens=usage.prompt)

    def _choice(self, choice: int) -> dict[str, Any]:
        finish = self._finishes[choice]
        return {
            "index": self._first_choice + choice,
            **self._form.whole("".join((self._echo.text, *self._texts[choice]))),
            "logprobs": self._logprobs_of(choice) if self._logprobs else None,
            "finish_reason": finish_reason(finish),
            "stop_reason": stop_reason(finish),
        }

    def _logprobs_of(self, choice: int) -> dict[str, Any]:
        echo = self._echo
        return self._form.logprobs(echo.text_offset).more([*echo.tokens, *self._tokens[choice]])
