"""When a sequence ends, and as what: judged at every token, so that nothing is computed beyond an end."""

from __future__ import annotations

from typing import Protocol

from services.protocol.events import EndOfText, ErrorCode, Failure, FinishReason, StopMatch, StopToken
from services.scheduler.engine.api import Failed, FailureKind, Sampled, SamplingSpec
from services.scheduler.sequence import Sequence
from services.scheduler.token_log import End

_ERROR_CODES = {
    FailureKind.BAD_OUTPUT: ErrorCode.BAD_MODEL_OUTPUT,
    FailureKind.OUT_OF_MEMORY: ErrorCode.OUT_OF_MEMORY,
    FailureKind.INTERNAL: ErrorCode.INTERNAL,
}


class StopRules(Protocol):
    """What of a sequence says which tokens end it."""

    @property
    def stop_ids(self) -> frozenset[int]: ...
    @property
    def min_tokens(self) -> int: ...
    @property
    def spec(self) -> SamplingSpec: ...


def stops_at(rules: StopRules, token_id: int, length: int) -> bool:
    """Whether this token, the last one of an output of `length` tokens, stops it."""
    # Under a constraint an end is drawn too early only where nothing else may follow.
    return token_id in rules.stop_ids and (length > rules.min_tokens or rules.spec.constraint is not None)


def natural_end(sequence: Sequence) -> End | None:
    """The end that the last output token brought, if it did: a stop goes before a limit reached by the same token."""
    length, token_id = len(sequence.log.ids), sequence.log.ids[-1]
    if stops_at(sequence, token_id, length):
        return End(FinishReason.STOP, length, stop=_stop_match(sequence, token_id))
    if length >= sequence.limit:
        return End(FinishReason.LENGTH, length)
    return None


def gave_up_waiting(sequence: Sequence, waited_s: float) -> End:
    """The end of a sequence that never got a place."""
    message = f"it waited for {waited_s:.0f} s and no place in the batch became free"
    return End(FinishReason.ERROR, len(sequence.log.ids), error=Failure(ErrorCode.QUEUE_TIMEOUT, message))


def cut_short(sequence: Sequence, reason: FinishReason) -> End:
    """The end of a sequence that somebody or its deadline stopped."""
    return End(reason, len(sequence.log.ids))


def failure_end(sequence: Sequence, answer: Sampled | Failed) -> End:
    """The end of a sequence for which the engine gave no token that exists."""
    if isinstance(answer, Failed):
        failure = Failure(_ERROR_CODES[answer.kind], answer.message)
    else:
        failure = Failure(
            ErrorCode.BAD_MODEL_OUTPUT, f"the engine drew token id {answer.token_id}, which doesn't exist"
        )
    return End(FinishReason.ERROR, len(sequence.log.ids), error=failure)


def _stop_match(sequence: Sequence, token_id: int) -> StopMatch:
    # Where an id is both, the caller asked for it: that is what it wants to hear.
    if token_id in sequence.attempt.submission.stop_token_ids:
        return StopToken(token_id)
    return EndOfText(token_id)
