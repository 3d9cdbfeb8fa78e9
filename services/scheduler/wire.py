"""The contract's messages to the scheduler's own words and back."""

from __future__ import annotations

import math

from services.protocol.constraint_wire import constraint_from_wire
from services.protocol.events import FinishReason
from services.protocol.hello import Hello
from services.protocol.hello import to_wire as hello_to_wire
from services.protocol.request import GREEDY_BELOW, Constraint
from services.protocol.wire import failure_to_wire, reason_to_wire, stop_to_wire, trace_from_wire, trace_to_wire
from services.runtime.error_tree import InvalidRequest
from services.scheduler.call import Rows
from services.scheduler.effects import Load
from services.scheduler.engine.api import Logprobs, SamplingSpec
from services.scheduler.ownership import Claim, Claimed, Held, HeldAttempt, Reconciled
from services.scheduler.submission import ChoiceStart, Route, Submission, TextPlan
from services.scheduler.token_log import TokenLog
from tailrace.v1 import common_pb2, scheduler_pb2

LOGPROB_FLOOR = -1e30
"""Stands for minus infinity, which JSON can't carry."""


def parse_submit(pb: scheduler_pb2.SubmitRequest) -> Submission:
    """A Submit. Raises InvalidRequest; what depends on the engine (ids, lengths) is checked by the core."""
    if not pb.attempt_id:
        raise InvalidRequest("attempt_id", "must not be 0")
    stopping = pb.stopping
    return Submission(
        attempt_id=pb.attempt_id,
        attempt_number=pb.attempt_number,
        route=_parse_route(pb.tokenizer, pb.tokenizer_epoch, "tokenizer"),
        tenant=pb.tenant,
        request_id=pb.request_id,
        fence=pb.fence,
        prompt_ids=tuple(pb.prompt_ids),
        choices=tuple(_parse_choice(choice) for choice in pb.choices),
        sampling=_parse_sampling(pb),
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens,
        text=_parse_text_plan(pb.text),
        deadline_in_s=pb.deadline_in_ms / 1000 if pb.deadline_in_ms else None,
        record=pb.record,
        priority=pb.priority,
        constraint=_parse_constraint(pb),
        trace=trace_from_wire(pb.trace),
    )


def parse_route_key(pb: scheduler_pb2.RouteKey) -> tuple[Route, int]:
    """A route and the generation of its call. Raises InvalidRequest."""
    if not pb.generation:
        raise InvalidRequest("route.generation", "must be at least 1")
    return _parse_route(pb.tokenizer, pb.tokenizer_epoch, "route.tokenizer"), pb.generation


def parse_owner(tokenizer: str, epoch: int) -> Route:
    """Who asks. Raises InvalidRequest."""
    return _parse_route(tokenizer, epoch, "tokenizer")


def parse_sender(
    pb: scheduler_pb2.SchedulerServiceAbortRequest | scheduler_pb2.SchedulerServiceReleaseRequest,
) -> Route | None:
    """Who sends an Abort or a Release; None where it doesn't say. Raises InvalidRequest."""
    return parse_owner(pb.tokenizer, pb.tokenizer_epoch) if pb.HasField("tokenizer") else None


def parse_claim(pb: scheduler_pb2.ClaimRequest) -> Claim:
    """Who wants which request. Raises InvalidRequest."""
    if not pb.request_id:
        raise InvalidRequest("request_id", "must not be empty")
    if not pb.attempt_number:
        raise InvalidRequest("attempt_number", "must be at least 1")
    return Claim(
        tenant=pb.tenant,
        request_id=pb.request_id,
        owner=parse_owner(pb.tokenizer, pb.tokenizer_epoch),
        attempt_number=pb.attempt_number,
        fence=pb.fence,
        attempt_ids=frozenset(pb.attempt_ids),
    )


def claimed_to_wire(epoch: int, claimed: Claimed) -> scheduler_pb2.ClaimResponse:
    """The answer to a Claim."""
    return scheduler_pb2.ClaimResponse(
        epoch=epoch,
        fence=claimed.fence,
        attempt_id=claimed.attempt_id,
        record=claimed.record,
        earlier_attempt_ids=claimed.earlier_attempt_ids,
        attempts=[_held_to_wire(attempt) for attempt in claimed.attempts],
    )


def held_to_wire(epoch: int, held: Held) -> scheduler_pb2.FindResponse:
    """The answer to a Find. A deadline that has passed reads as its last millisecond: 0 would be none at all."""
    left_s = held.deadline_in_s
    return scheduler_pb2.FindResponse(
        epoch=epoch,
        fence=held.fence,
        owner_present=held.owner_present,
        tokenizer=held.owner.tokenizer,
        record=held.record,
        prompt_ids=held.prompt_ids,
        deadline_in_ms=0 if left_s is None else max(round(left_s * 1000), 1),
        attempts=[_held_to_wire(attempt) for attempt in held.attempts],
    )


def reconciled_to_wire(epoch: int, reconciled: Reconciled) -> scheduler_pb2.ReconcileResponse:
    """The answer to a Reconcile."""
    return scheduler_pb2.ReconcileResponse(
        epoch=epoch,
        released_attempt_ids=reconciled.released,
        missing_attempt_ids=reconciled.missing,
        stale_attempt_ids=reconciled.stale,
    )


def parse_abort_reason(value: int) -> FinishReason:
    """What aborted sequences end with. Raises InvalidRequest."""
    if value in (common_pb2.FINISH_REASON_UNSPECIFIED, common_pb2.FINISH_REASON_ABORTED):
        return FinishReason.ABORTED
    if value == common_pb2.FINISH_REASON_DEADLINE:
        return FinishReason.DEADLINE
    raise InvalidRequest("reason", "must be FINISH_REASON_ABORTED or FINISH_REASON_DEADLINE")


def tokens_hello(hello: Hello) -> scheduler_pb2.StreamTokensResponse:
    """The first message of a token stream."""
    return scheduler_pb2.StreamTokensResponse(hello=hello_to_wire(hello))


def tokens_heartbeat() -> scheduler_pb2.StreamTokensResponse:
    """An empty batch."""
    return scheduler_pb2.StreamTokensResponse(batch=scheduler_pb2.TokenBatch())


def tokens_to_wire(rows: Rows) -> scheduler_pb2.StreamTokensResponse:
    """A batch. The columns are copied whole: a message per row would cost ten times as much."""
    message = scheduler_pb2.StreamTokensResponse()
    batch = message.batch
    batch.SetInParent()
    batch.sequences.extend(rows.sequences)
    batch.token_offsets.extend(rows.token_offsets)
    batch.token_ids.extend(rows.token_ids)
    if len(rows.token_ids) != len(rows.sequences):
        batch.token_counts.extend(rows.token_counts)
    for number, log in rows.starts:
        batch.starts.append(_start_to_wire(number, log))
    for row, logprobs in rows.logprobs:
        batch.row_logprobs.add(row=row, tokens=[_logprobs_to_wire(one) for one in logprobs])
    for number, log in rows.prompts:
        prompt = batch.prompts.add(sequence=number, cached_prompt_tokens=log.cached_prompt_tokens)
        if log.prompt is not None:
            prompt.token_ids.extend(log.prompt.ids)
            prompt.logprobs.extend(_logprobs_to_wire(one) for one in log.prompt.logprobs)
    for number, log in rows.ends:
        batch.ends.append(_end_to_wire(number, log))
    batch.released_attempt_ids.extend(rows.released)
    return message


def load_hello(hello: Hello) -> scheduler_pb2.StreamLoadResponse:
    """The first message of a load stream."""
    return scheduler_pb2.StreamLoadResponse(hello=hello_to_wire(hello))


def load_to_wire(load: Load) -> scheduler_pb2.StreamLoadResponse:
    """The load."""
    return scheduler_pb2.StreamLoadResponse(
        load=scheduler_pb2.Load(
            waiting_sequences=load.waiting_sequences,
            running_sequences=load.running_sequences,
            free_blocks=load.free_blocks,
            cached_blocks=load.cached_blocks,
            total_blocks=load.total_blocks,
            block_size=load.block_size,
            draining=load.draining,
        )
    )


def _held_to_wire(attempt: HeldAttempt) -> scheduler_pb2.HeldAttempt:
    return scheduler_pb2.HeldAttempt(
        attempt_id=attempt.attempt_id,
        fence=attempt.fence,
        attempt_number=attempt.attempt_number,
        choices=[
            scheduler_pb2.HeldChoice(choice=choice, token_offset=tokens, ended=ended)
            for choice, tokens, ended in attempt.choices
        ],
    )


def _parse_route(tokenizer: str, epoch: int, field: str) -> Route:
    if not tokenizer:
        raise InvalidRequest(field, "must not be empty")
    return Route(tokenizer, epoch)


def _parse_choice(pb: scheduler_pb2.SubmitChoice) -> ChoiceStart:
    return ChoiceStart(pb.choice, tuple(pb.output_ids), tuple(_parse_logprobs(one) for one in pb.output_logprobs))


def _parse_logprobs(pb: scheduler_pb2.TokenLogprobs) -> Logprobs:
    return Logprobs(pb.logprob, tuple(pb.top_ids), tuple(pb.top_logprobs))


def _parse_sampling(pb: scheduler_pb2.SubmitRequest) -> SamplingSpec:
    sampling = pb.sampling
    if not sampling.HasField("seed"):
        raise InvalidRequest("sampling.seed", "must be set: what is drawn must not depend on who draws it")
    temperature = sampling.temperature if sampling.HasField("temperature") else 1.0
    return SamplingSpec(
        seed=sampling.seed,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=tuple(sorted(sampling.logit_bias.items())),
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
        prompt_logprobs=pb.prompt_logprobs if pb.HasField("prompt_logprobs") else None,
    )


def _parse_constraint(pb: scheduler_pb2.SubmitRequest) -> Constraint | None:
    if not pb.HasField("constraint"):
        return None
    if pb.stopping.ignore_eos:
        raise InvalidRequest("stopping.ignore_eos", "can't stand beside constraint, which says where to end")
    return constraint_from_wire(pb.constraint, "constraint")


def _parse_text_plan(pb: scheduler_pb2.TextPlan) -> TextPlan:
    return TextPlan(
        stop=tuple(pb.stop),
        include_stop_in_output=pb.include_stop_in_output,
        min_tokens=pb.min_tokens,
        skip_special_tokens=pb.skip_special_tokens,
        spaces_between_special_tokens=pb.spaces_between_special_tokens,
        begins_text=pb.begins_text,
        token_info=pb.token_info,
    )


def _start_to_wire(number: int, log: TokenLog) -> scheduler_pb2.SequenceStart:
    text = log.text
    return scheduler_pb2.SequenceStart(
        sequence=number,
        attempt_id=log.attempt_id,
        choice=log.choice,
        text=scheduler_pb2.TextPlan(
            stop=text.stop,
            include_stop_in_output=text.include_stop_in_output,
            min_tokens=text.min_tokens,
            skip_special_tokens=text.skip_special_tokens,
            spaces_between_special_tokens=text.spaces_between_special_tokens,
            begins_text=text.begins_text,
            token_info=text.token_info,
            end_token_ids=text.end_token_ids,
        ),
        trace=trace_to_wire(log.trace),
    )


def _end_to_wire(number: int, log: TokenLog) -> scheduler_pb2.SequenceEnd:
    end = log.end
    assert end is not None
    return scheduler_pb2.SequenceEnd(
        sequence=number,
        token_offset=end.token_offset,
        reason=reason_to_wire(end.reason),
        stop=stop_to_wire(end.stop),
        error=failure_to_wire(end.error),
        cached_prompt_tokens=log.cached_prompt_tokens,
    )


def _logprobs_to_wire(logprobs: Logprobs) -> scheduler_pb2.TokenLogprobs:
    return scheduler_pb2.TokenLogprobs(
        logprob=_finite(logprobs.logprob),
        top_ids=logprobs.top_ids,
        top_logprobs=[_finite(value) for value in logprobs.top_logprobs],
    )


def _finite(logprob: float) -> float:
    return logprob if logprob > LOGPROB_FLOOR and not math.isnan(logprob) else LOGPROB_FLOOR
