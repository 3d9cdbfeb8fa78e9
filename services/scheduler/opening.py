"""From a valid submission to an attempt with its sequences, one per choice."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from services.scheduler.engine.api import EngineInfo, SequenceKey
from services.scheduler.policy import Policy
from services.scheduler.sequence import Attempt, Sequence
from services.scheduler.state import AttemptEvent, AttemptPhase, next_attempt_phase
from services.scheduler.submission import ChoiceStart, Submission
from services.scheduler.token_log import PromptScores, TokenLog


def open_attempt(
    submission: Submission,
    limit: int,
    info: EngineInfo,
    policy: Policy,
    keys: Iterator[SequenceKey],
    now: float,
) -> Attempt:
    """The attempt that is accepted at `now`; each choice may have `limit` output tokens."""
    phase = next_attempt_phase(AttemptPhase.UNKNOWN, AttemptEvent.SUBMIT)
    deadline = None if submission.deadline_in_s is None else now + submission.deadline_in_s
    attempt = Attempt(submission, now, deadline, phase)
    attempt.sequences = [
        _open_sequence(attempt, start, limit, info, policy, next(keys)) for start in submission.choices
    ]
    if submission.sampling.prompt_logprobs is not None:
        attempt.sequences[0].log.prompt = PromptScores(submission.prompt_ids)
    attempt.open_sequences = len(attempt.sequences)
    return attempt


def _open_sequence(
    attempt: Attempt, start: ChoiceStart, limit: int, info: EngineInfo, policy: Policy, key: SequenceKey
) -> Sequence:
    submission = attempt.submission
    eos_ids = () if submission.ignore_eos else info.eos_token_ids
    stop_ids = tuple(dict.fromkeys((*eos_ids, *submission.stop_token_ids)))
    suppressible = stop_ids if submission.min_tokens else ()
    return Sequence(
        attempt=attempt,
        log=_open_log(submission, start, stop_ids, key),
        rank=policy.rank(submission, attempt.arrived_at, key),
        spec=replace(submission.sampling, choice=start.choice, suppressible_ids=suppressible),
        limit=limit,
        min_tokens=submission.min_tokens,
        stop_ids=frozenset(stop_ids),
        changed_at=attempt.arrived_at,
    )


def _open_log(submission: Submission, start: ChoiceStart, stop_ids: tuple[int, ...], key: SequenceKey) -> TokenLog:
    """A log that begins with the output so far."""
    log = TokenLog(
        key,
        submission.attempt_id,
        start.choice,
        submission.route,
        replace(submission.text, end_token_ids=stop_ids),
        with_logprobs=submission.sampling.logprobs is not None,
    )
    log.trace = submission.trace
    log.ids.extend(start.output_ids)
    if log.logprobs is not None:
        log.logprobs += start.output_logprobs
    return log
