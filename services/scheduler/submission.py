"""What a scheduler is asked to run, after it was found valid: no protobuf, every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from services.protocol.request import Constraint
from services.runtime.trace import TraceContext
from services.scheduler.engine.api import Logprobs, SamplingSpec


class Route(NamedTuple):
    """Whose stream carries the output: one incarnation of a tokenizer."""

    tokenizer: str
    epoch: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """For the detokenizer: how ids become text. The scheduler hands it on, and adds which tokens end the sequence."""

    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    begins_text: bool = False
    token_info: bool = False
    end_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceStart:
    """One unfinished choice, with its output so far where it is continued; logprobs are one per id or none."""

    choice: int
    output_ids: tuple[int, ...] = ()
    output_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One attempt. `sampling` holds for every choice but for its number; `max_tokens` None: what the context leaves.

    `constraint` is what was asked for; compiled, it is part of `sampling`. A higher `priority` may go first.
    `deadline_in_s`: what is left of the request's time, None for no limit. `record` is the tokenizer's, not read here,
    and `trace` is its attempt's.
    """

    attempt_id: int
    route: Route
    prompt_ids: tuple[int, ...]
    choices: tuple[ChoiceStart, ...]
    sampling: SamplingSpec
    text: TextPlan = TextPlan()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0
    deadline_in_s: float | None = None
    priority: int = 0
    constraint: Constraint | None = None
    attempt_number: int = 0
    tenant: str = ""
    request_id: str = ""
    fence: int = 1
    record: bytes = b""
    trace: TraceContext | None = None

    @property
    def continues(self) -> bool:
        """Whether this goes on with output that a caller may already have seen."""
        return any(start.output_ids for start in self.choices)
