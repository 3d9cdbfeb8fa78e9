"""The log of one sequence: its output ids from token 0, its end, and where its one reader stands."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from services.protocol.events import Failure, FinishReason, StopMatch
from services.runtime.trace import TraceContext
from services.scheduler.engine.api import Logprobs, SequenceKey
from services.scheduler.submission import Route, TextPlan

if TYPE_CHECKING:
    from services.scheduler.call import Cursor


@dataclass(frozen=True, slots=True)
class End:
    """Why and where a sequence ended; `token_offset` counts all of its output, the stop token included."""

    reason: FinishReason
    token_offset: int
    stop: StopMatch | None = None
    error: Failure | None = None


@dataclass(slots=True)
class PromptScores:
    """A prompt's ids, and so far the logarithmic probabilities of those from the second on."""

    ids: tuple[int, ...]
    logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def missing(self) -> bool:
        """Whether some are still to come."""
        return len(self.logprobs) < len(self.ids) - 1

    def add(self, first: int, logprobs: Sequence[Logprobs]) -> None:
        """Those of ids from position `first` on; a recompute brings some again."""
        self.logprobs += logprobs[len(self.logprobs) + 1 - first :]


class TokenLog:
    """Append-only. Ids are four bytes each: a log may grow to the whole context and is kept until released.

    `logprobs` has one entry per id where they were asked for, otherwise it is None. `cursor` is the publisher's: a log
    has one reader, the newest call of its route. `route` changes when the request is claimed. `cached_prompt_tokens` is
    known when there is a token. `prompt` is None unless its logprobs were asked for. `trace`: what its reader is told.
    """

    __slots__ = (
        "attempt_id",
        "cached_prompt_tokens",
        "choice",
        "cursor",
        "end",
        "ids",
        "key",
        "logprobs",
        "prompt",
        "route",
        "text",
        "trace",
    )

    def __init__(
        self, key: SequenceKey, attempt_id: int, choice: int, route: Route, text: TextPlan, *, with_logprobs: bool
    ) -> None:
        self.key = key
        self.attempt_id = attempt_id
        self.choice = choice
        self.route = route
        self.text = text
        self.ids = array("I")
        self.logprobs: list[Logprobs] | None = [] if with_logprobs else None
        self.cached_prompt_tokens = 0
        self.prompt: PromptScores | None = None
        self.end: End | None = None
        self.cursor: Cursor | None = None
        self.trace: TraceContext | None = None
