"""The events of an answer's stream, as every service between the engine and the caller means them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a choice ended; the values are the contract's."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3
    DEADLINE = 4
    ERROR = 5


class ErrorCode(Enum):
    """What kind of failure ended an accepted request; the values are the contract's."""

    INTERNAL = 1
    BAD_MODEL_OUTPUT = 2
    OUT_OF_MEMORY = 3
    ENGINE_LOST = 4
    INTEGRITY = 5
    SLOW_READER = 6
    QUEUE_TIMEOUT = 7


class AbortOutcome(Enum):
    """What an abort met; the values are the contract's."""

    ABORTING = 1
    ALREADY_FINISHED = 2
    NOT_FOUND = 3


@dataclass(frozen=True, slots=True)
class StopText:
    """The answer ended at one of the request's stop texts."""

    text: str


@dataclass(frozen=True, slots=True)
class StopToken:
    """The answer ended at one of the request's stop token ids."""

    token_id: int


@dataclass(frozen=True, slots=True)
class EndOfText:
    """The answer ended at one of the model's end-of-text tokens."""

    token_id: int


StopMatch = StopText | StopToken | EndOfText


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong after acceptance; the message is one sentence for people."""

    code: ErrorCode
    message: str


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at an output position."""

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One output token with its own bytes; `logprob` None unless asked for."""

    token_id: int
    bytes: bytes
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens; output summed over its choices. `prompt`: its tokens, where asked for."""

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int
    prompt: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was accepted."""

    request_id: str
    resume_token: bytes
    model: str
    created_unix_ms: int
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of a choice; offsets count this choice's tokens and code points after it."""

    choice: int
    text: str
    token_ids: Sequence[int]
    next_token_offset: int
    next_text_offset: int
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice ended; `stop` with STOP, `error` with ERROR. `output_tokens` counts the stop's own."""

    choice: int
    reason: FinishReason
    output_tokens: int
    stop: StopMatch | None = None
    error: Failure | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """All choices ended; nothing follows."""

    usage: Usage


Event = Started | Delta | Finish | Completed
