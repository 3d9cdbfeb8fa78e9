"""Views as the contract's messages and back: processes write them, `tailrace doctor`, `top` and `trace` read them."""

from __future__ import annotations

from dataclasses import fields

from services.protocol import hello as greeting
from services.protocol.views import (
    ChoiceView,
    Content,
    HopView,
    Moment,
    ProcessView,
    ReaderView,
    RequestView,
    RouteKey,
    RouteView,
    SchedulerView,
)
from tailrace.v1 import admin_pb2, scheduler_pb2

_SHAPED = {"deadline_in_ms", "finished_ms", "route", "moments", "readers", "choices"}
_REQUEST_FIELDS = tuple(field.name for field in fields(RequestView) if field.name not in _SHAPED)
_CHOICE_FIELDS = tuple(field.name for field in fields(ChoiceView) if field.name != "choice")


def request_to_wire(view: RequestView) -> admin_pb2.RequestView:
    """A request. What stands at its default is left out: a list has many of them, and is asked for each second."""
    pb = admin_pb2.RequestView()
    for name in _REQUEST_FIELDS:
        if value := getattr(view, name):
            setattr(pb, name, value)
    if view.deadline_in_ms is not None:
        pb.deadline_in_ms = view.deadline_in_ms
    if view.finished_ms is not None:
        pb.finished_ms = view.finished_ms
    if view.route is not None:
        route = pb.route
        route.tokenizer, route.tokenizer_epoch, route.generation = view.route
    for what, unix_us in view.moments:
        pb.moments.add(what=what, unix_us=unix_us)
    for gateway_epoch, stream_id, token_offsets in view.readers:
        pb.readers.add(gateway_epoch=gateway_epoch, stream_id=stream_id, token_offsets=token_offsets)
    for choice in view.choices:
        _write_choice(choice, pb.choices.add(choice=choice.choice))
    return pb


def request_from_wire(pb: admin_pb2.RequestView) -> RequestView:
    """A request, read."""
    return RequestView(
        request_id=pb.request_id,
        attempt_id=pb.attempt_id,
        caller_phase=pb.caller_phase,
        engine_phase=pb.engine_phase,
        age_ms=pb.age_ms,
        choices=tuple(_choice_from_wire(choice) for choice in pb.choices),
        tenant=pb.tenant,
        moments=tuple(Moment(what=moment.what, unix_us=moment.unix_us) for moment in pb.moments),
        fence=pb.fence,
        upstream=pb.upstream,
        upstream_epoch=pb.upstream_epoch,
        route=route_from_wire(pb.route) if pb.HasField("route") else None,
        attempts=pb.attempts,
        readers=tuple(_reader_from_wire(reader) for reader in pb.readers),
        prompt_tokens=pb.prompt_tokens,
        deadline_in_ms=pb.deadline_in_ms if pb.HasField("deadline_in_ms") else None,
        stream_id=pb.stream_id,
        whole=pb.whole,
        waits_for=pb.waits_for,
        ended=pb.ended,
        finished_ms=pb.finished_ms if pb.HasField("finished_ms") else None,
    )


def process_to_wire(view: ProcessView) -> admin_pb2.ProcessView:
    """A process."""
    return admin_pb2.ProcessView(
        name=view.name,
        service=view.service,
        phase=view.phase,
        ready=view.ready,
        not_ready_why=view.not_ready_why,
        uptime_ms=view.uptime_ms,
        unix_us=view.unix_us,
        hops=[_hop_to_wire(hop) for hop in view.hops],
        output_tokens=view.output_tokens,
        scheduler=None if view.scheduler is None else _scheduler_to_wire(view.scheduler),
    )


def process_from_wire(pb: admin_pb2.ProcessView) -> ProcessView:
    """A process, read."""
    return ProcessView(
        name=pb.name,
        service=pb.service,
        phase=pb.phase,
        ready=pb.ready,
        not_ready_why=pb.not_ready_why,
        uptime_ms=pb.uptime_ms,
        unix_us=pb.unix_us,
        hops=tuple(_hop_from_wire(hop) for hop in pb.hops),
        output_tokens=pb.output_tokens,
        scheduler=_scheduler_from_wire(pb.scheduler) if pb.HasField("scheduler") else None,
    )


def content_to_wire(content: Content) -> admin_pb2.Content:
    """A request's prompt and output."""
    return admin_pb2.Content(prompt_ids=content.prompt_ids, prompt=content.prompt, outputs=content.outputs)


def _write_choice(view: ChoiceView, pb: admin_pb2.ChoiceView) -> None:
    for name in _CHOICE_FIELDS:
        if value := getattr(view, name):
            setattr(pb, name, value)


def _choice_from_wire(pb: admin_pb2.ChoiceView) -> ChoiceView:
    return ChoiceView(
        choice=pb.choice,
        log_token_offset=pb.log_token_offset,
        log_text_offset=pb.log_text_offset,
        cursor_token_offset=pb.cursor_token_offset,
        blocks=pb.blocks,
        idle_ms=pb.idle_ms,
        phase=pb.phase,
        finish_reason=pb.finish_reason,
        held_for_stop=pb.held_for_stop,
        incomplete_character=pb.incomplete_character,
        preemptions=pb.preemptions,
    )


def _reader_from_wire(pb: admin_pb2.ReaderView) -> ReaderView:
    return ReaderView(gateway_epoch=pb.gateway_epoch, stream_id=pb.stream_id, token_offsets=tuple(pb.token_offsets))


def _route_to_wire(route: RouteKey | None) -> scheduler_pb2.RouteKey | None:
    if route is None:
        return None
    return scheduler_pb2.RouteKey(
        tokenizer=route.tokenizer, tokenizer_epoch=route.tokenizer_epoch, generation=route.generation
    )


def route_from_wire(pb: scheduler_pb2.RouteKey) -> RouteKey:
    """A route's key, read."""
    return RouteKey(tokenizer=pb.tokenizer, tokenizer_epoch=pb.tokenizer_epoch, generation=pb.generation)


def _hop_to_wire(view: HopView) -> admin_pb2.HopView:
    return admin_pb2.HopView(
        what=view.what,
        sender=view.sender,
        scheduler=view.scheduler,
        hello=None if view.hello is None else greeting.to_wire(view.hello),
        up=view.up,
        why_not=view.why_not,
        since_ms=max(view.since_ms, 0),
        silent_ms=max(view.silent_ms, 0),
        route=_route_to_wire(view.route),
        calls=view.calls,
        lag_ms=view.lag_ms,
    )


def _hop_from_wire(pb: admin_pb2.HopView) -> HopView:
    return HopView(
        what=pb.what,
        sender=pb.sender,
        scheduler=pb.scheduler,
        hello=greeting.from_wire(pb.hello) if pb.HasField("hello") else None,
        up=pb.up,
        why_not=pb.why_not,
        since_ms=pb.since_ms,
        silent_ms=pb.silent_ms,
        route=route_from_wire(pb.route) if pb.HasField("route") else None,
        calls=pb.calls,
        lag_ms=pb.lag_ms,
    )


def _scheduler_to_wire(view: SchedulerView) -> admin_pb2.SchedulerView:
    return admin_pb2.SchedulerView(
        waiting=view.waiting,
        running=view.running,
        running_max=view.running_max,
        free_blocks=view.free_blocks,
        cached_blocks=view.cached_blocks,
        total_blocks=view.total_blocks,
        block_size=view.block_size,
        step_ms=view.step_ms,
        stepped_ms=view.stepped_ms,
        stalled=view.stalled,
        routes=[
            admin_pb2.RouteView(route=_route_to_wire(route.route), read=route.read, sequences=route.sequences)
            for route in view.routes
        ],
    )


def _scheduler_from_wire(pb: admin_pb2.SchedulerView) -> SchedulerView:
    return SchedulerView(
        waiting=pb.waiting,
        running=pb.running,
        running_max=pb.running_max,
        free_blocks=pb.free_blocks,
        cached_blocks=pb.cached_blocks,
        total_blocks=pb.total_blocks,
        block_size=pb.block_size,
        step_ms=pb.step_ms if pb.HasField("step_ms") else None,
        stepped_ms=pb.stepped_ms if pb.HasField("stepped_ms") else None,
        stalled=pb.stalled,
        routes=tuple(_read_route(route) for route in pb.routes),
    )


def _read_route(pb: admin_pb2.RouteView) -> RouteView:
    return RouteView(route=route_from_wire(pb.route), read=pb.read, sequences=pb.sequences)
