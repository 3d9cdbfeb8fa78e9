"""The tokenizer's own messages: text batches and submissions, and event batches for gateways."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import grpc.aio
from google.protobuf.message import DecodeError

from services.protocol.answer import ChoiceLog
from services.protocol.constraint_wire import constraint_to_wire
from services.protocol.events import Completed, Started
from services.protocol.generation import OpenPb
from services.protocol.hello import from_wire as hello_from_wire
from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_chat, parse_generate
from services.protocol.request import ChatPrompt, Sampling, Stopping, ValidRequest
from services.protocol.wire import (
    completed_to_wire,
    failure_from_wire,
    finish_to_wire,
    reason_from_wire,
    started_from_wire,
    started_to_wire,
    stop_from_wire,
    tokens_from_wire,
    tokens_to_wire,
    trace_from_wire,
    trace_to_wire,
)
from services.runtime.errors import InvalidRequest, PreconditionFailed, TailraceError, from_rpc_error
from services.runtime.trace import TraceContext
from services.tokenizer.acceptance import pin_as
from services.tokenizer.assembler import EngineEnd, Prompt, TextBatch, TextFinish, TextStart
from services.tokenizer.claims import ClaimAnswer, Held, HeldAttempt, Record
from services.tokenizer.columns import EventColumns
from services.tokenizer.entry import Attempt, Entry
from services.tokenizer.gateway_streams import Readiness
from services.tokenizer.route import Draining, RouteHello, TextMessage
from tailrace.v1 import common_pb2, detokenizer_pb2, generation_pb2, scheduler_pb2, tokenizer_pb2

RECORD_VERSION = 1

MAX_UINT32 = (1 << 32) - 1


def text_batch_from_wire(pb: detokenizer_pb2.TextBatch, news_us: int = 0) -> TextBatch:
    """A TextBatch message, read."""
    return TextBatch(
        starts=[
            TextStart(start.sequence, start.attempt_id, start.choice, trace_from_wire(start.trace))
            for start in pb.starts
        ],
        prompts=[
            Prompt(prompt.sequence, prompt.cached_prompt_tokens, tuple(tokens_from_wire(prompt.tokens)))
            for prompt in pb.prompts
        ],
        sequences=pb.sequences,
        token_offsets=pb.token_offsets,
        token_counts=pb.token_counts,
        # Sliced by row where rows have several ids, which a list does fastest.
        token_ids=list(pb.token_ids),
        text_offsets=pb.text_offsets,
        texts=pb.texts,
        row_tokens={row.row: tokens_from_wire(row.tokens) for row in pb.row_tokens},
        finishes=[_finish_from_wire(finish) for finish in pb.finishes],
        engine_ends=[EngineEnd(end.sequence, end.cached_prompt_tokens) for end in pb.engine_ends],
        released_attempt_ids=pb.released_attempt_ids,
        news_us=news_us,
    )


def submit_to_wire(
    attempt: Attempt, *, tokenizer: str, tokenizer_epoch: int, deadline_in_ms: int
) -> scheduler_pb2.SubmitRequest:
    """A Submit of the attempt's choices, each with its output so far; `deadline_in_ms` 0: no limit."""
    entry = attempt.entry
    request = entry.pinned.request
    return scheduler_pb2.SubmitRequest(
        attempt_id=attempt.attempt_id,
        attempt_number=attempt.number,
        tokenizer=tokenizer,
        tokenizer_epoch=tokenizer_epoch,
        tenant=entry.tenant,
        request_id=request.request_id,
        fence=entry.fence,
        prompt_ids=entry.pinned.prompt_ids,
        choices=[_choice_to_wire(choice, entry.log.choices[choice], request.logprobs) for choice in attempt.choices],
        sampling=_sampling_to_wire(request.sampling),
        stopping=_stopping_to_wire(request.stopping),
        text=_text_plan_to_wire(request),
        logprobs=request.logprobs,
        prompt_logprobs=request.prompt_logprobs,
        deadline_in_ms=min(deadline_in_ms, MAX_UINT32),
        record=entry.record,
        priority=request.priority,
        constraint=constraint_to_wire(request.constraint),
        trace=trace_to_wire(attempt.trace),
    )


def record_to_wire(asked: OpenPb, started: Started, max_tokens: int, trace: TraceContext | None = None) -> bytes:
    """What is left at schedulers of a request that came as `asked`."""
    record = tokenizer_pb2.RequestRecord(
        version=RECORD_VERSION, started=started_to_wire(started), max_tokens=max_tokens, trace=trace_to_wire(trace)
    )
    if isinstance(asked, generation_pb2.ChatRequest):
        record.chat.CopyFrom(asked)
    else:
        record.generate.CopyFrom(asked)
    return record.SerializeToString()


def record_from_wire(raw: bytes, prompt_ids: Sequence[int], card: ModelCard) -> Record:
    """The same, read by whoever claims the request. Raises PreconditionFailed for what can't be continued from."""
    try:
        pb = tokenizer_pb2.RequestRecord.FromString(raw)
    except DecodeError as error:
        raise PreconditionFailed("what another tokenizer left of the request can't be read") from error
    if pb.version != RECORD_VERSION:
        raise PreconditionFailed(f"the request was left in version {pb.version}; this tokenizer reads {RECORD_VERSION}")
    is_chat = pb.WhichOneof("request") == "chat"
    asked = parse_chat(pb.chat, card) if is_chat else parse_generate(pb.generate, card)
    started = started_from_wire(pb.started)
    pinned = pin_as(asked, prompt_ids, request_id=started.request_id, seed=started.seed, max_tokens=pb.max_tokens)
    return Record(pinned, started, raw, trace_from_wire(pb.trace))


def held_from_wire(pb: scheduler_pb2.FindResponse, scheduler: str, card: ModelCard) -> Held:
    """What a scheduler holds of a request. Raises like record_from_wire."""
    return Held(
        scheduler=scheduler,
        epoch=pb.epoch,
        fence=pb.fence,
        owner_present=pb.owner_present,
        record=record_from_wire(pb.record, list(pb.prompt_ids), card),
        deadline_in_s=pb.deadline_in_ms / 1000 if pb.deadline_in_ms else None,
        attempts=[_held_attempt(attempt) for attempt in pb.attempts],
    )


def claim_to_wire(
    entry: Entry, scheduler: str, *, tokenizer: str, tokenizer_epoch: int, attempt_number: int
) -> scheduler_pb2.ClaimRequest:
    """A Claim of what another tokenizer had at this scheduler."""
    return scheduler_pb2.ClaimRequest(
        tenant=entry.tenant,
        request_id=entry.request_id,
        tokenizer=tokenizer,
        tokenizer_epoch=tokenizer_epoch,
        attempt_number=attempt_number,
        fence=entry.fence,
        attempt_ids=[attempt.attempt_id for attempt in entry.attempts if attempt.scheduler == scheduler],
    )


def claim_answer_from_wire(pb: scheduler_pb2.ClaimResponse) -> ClaimAnswer:
    """The answer to a Claim."""
    return ClaimAnswer(pb.epoch, pb.fence, [_held_attempt(attempt) for attempt in pb.attempts])


def text_message_from_wire(pb: detokenizer_pb2.StreamTextResponse) -> TextMessage:
    """One message of a route; of a kind that a newer detokenizer may send, only that it lives."""
    match pb.WhichOneof("payload"):
        case "hello":
            return RouteHello(hello_from_wire(pb.hello.detokenizer), hello_from_wire(pb.hello.scheduler))
        case "draining":
            return Draining()
        case _:
            return text_batch_from_wire(pb.batch, pb.news_us)


def refusal_from_wire(error: grpc.aio.AioRpcError) -> TailraceError:
    """Why a scheduler refused a Submit; the constraint, which only it can compile, is named as the caller knows it."""
    refusal = from_rpc_error(error)
    if isinstance(refusal, InvalidRequest) and refusal.field.startswith("constraint"):
        return InvalidRequest(f"options.{refusal.field}", refusal.reason_text)
    return refusal


def event_batch_to_wire(columns: EventColumns) -> tokenizer_pb2.StreamEventsResponse:
    """A message with an EventBatch; columns that say nothing are left out."""
    message = tokenizer_pb2.StreamEventsResponse()
    # Filled in place: a batch that is given to the constructor is copied.
    batch = message.batch
    batch.SetInParent()
    batch.stream_ids.extend(columns.stream_ids)
    if columns.several_choices:
        batch.choices.extend(columns.choices)
    batch.token_offsets.extend(columns.token_offsets)
    if columns.several_tokens:
        batch.token_counts.extend(columns.token_counts)
    batch.token_ids.extend(columns.token_ids)
    batch.text_offsets.extend(columns.text_offsets)
    batch.texts.extend(columns.texts)
    for row, tokens in columns.row_tokens:
        batch.row_tokens.add(row=row, tokens=tokens_to_wire(tokens))
    for stream_id, finish in columns.finishes:
        batch.finishes.add(stream_id=stream_id, finish=finish_to_wire(finish))
    for stream_id, cut in columns.cuts:
        batch.cuts.add(stream_id=stream_id, reason=cast(tokenizer_pb2.CutReason, cut.value))
    for stream_id, usage in columns.completions:
        batch.completions.add(stream_id=stream_id, completed=completed_to_wire(Completed(usage)))
    return message


def attached_to_wire(epoch: int, entry: Entry) -> tokenizer_pb2.AttachResponse:
    """The answer to an Attach."""
    request = entry.pinned.request
    return tokenizer_pb2.AttachResponse(
        epoch=epoch,
        started=started_to_wire(entry.started),
        n=request.n,
        delivery=generation_pb2.DELIVERY_WHOLE if request.whole else generation_pb2.DELIVERY_STREAM,
    )


def readiness_to_wire(readiness: Readiness) -> tokenizer_pb2.StreamEventsResponse:
    """A message with a Readiness."""
    return tokenizer_pb2.StreamEventsResponse(
        readiness=tokenizer_pb2.Readiness(ready=readiness.ready, why_not=readiness.why_not)
    )


def _held_attempt(pb: scheduler_pb2.HeldAttempt) -> HeldAttempt:
    choices = {choice.choice: (choice.token_offset, choice.ended) for choice in pb.choices}
    return HeldAttempt(pb.attempt_id, pb.fence, pb.attempt_number, choices)


def _finish_from_wire(pb: detokenizer_pb2.TextFinish) -> TextFinish:
    return TextFinish(
        pb.sequence,
        pb.token_offset,
        pb.text_offset,
        reason_from_wire(pb.reason),
        stop_from_wire(pb.stop) if pb.HasField("stop") else None,
        failure_from_wire(pb.error) if pb.HasField("error") else None,
    )


def _choice_to_wire(choice: int, log: ChoiceLog, logprobs: int | None) -> scheduler_pb2.SubmitChoice:
    tokens = () if logprobs is None else log.tokens
    return scheduler_pb2.SubmitChoice(
        choice=choice,
        output_ids=log.token_ids,
        output_logprobs=[
            scheduler_pb2.TokenLogprobs(
                logprob=token.logprob,
                top_ids=[top.token_id for top in token.top],
                top_logprobs=[top.logprob for top in token.top],
            )
            for token in tokens
        ],
    )


def _sampling_to_wire(sampling: Sampling) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        seed=sampling.seed,
        logit_bias=dict(sampling.logit_bias),
    )


def _stopping_to_wire(stopping: Stopping) -> common_pb2.StopConditions:
    return common_pb2.StopConditions(
        stop=stopping.stop,
        stop_token_ids=stopping.stop_token_ids,
        include_stop_in_output=stopping.include_stop_in_output,
        ignore_eos=stopping.ignore_eos,
        max_tokens=stopping.max_tokens,
        min_tokens=stopping.min_tokens,
    )


def _text_plan_to_wire(request: ValidRequest) -> scheduler_pb2.TextPlan:
    return scheduler_pb2.TextPlan(
        stop=request.stopping.stop,
        include_stop_in_output=request.stopping.include_stop_in_output,
        min_tokens=request.stopping.min_tokens,
        skip_special_tokens=request.text.skip_special_tokens,
        spaces_between_special_tokens=request.text.spaces_between_special_tokens,
        begins_text=isinstance(request.prompt, ChatPrompt),
        token_info=request.token_info,
    )
