"""Nothing that a process shows is lost on its way to whoever asked."""

from __future__ import annotations

from dataclasses import MISSING, fields

from services.protocol.hello import Hello
from services.protocol.views import (
    ChoiceView,
    HopView,
    Moment,
    ProcessView,
    ReaderView,
    RequestView,
    RouteKey,
    RouteView,
    SchedulerView,
)
from services.protocol.views_wire import process_from_wire, process_to_wire, request_from_wire, request_to_wire
from tailrace.v1 import admin_pb2

ROUTE = RouteKey(tokenizer="tokenizer-1", tokenizer_epoch=1 << 63, generation=3)

REQUEST = RequestView(
    request_id="r-1", attempt_id=1 << 63, caller_phase="OPEN", engine_phase="RUNNING", age_ms=5, tenant="t",
    moments=(Moment("opened", 1 << 60), Moment("accepted", (1 << 60) + 1)), fence=2, upstream="s:1", upstream_epoch=7,
    route=ROUTE, attempts=2, readers=(ReaderView(gateway_epoch=9, stream_id=4, token_offsets=(3, 5)),), prompt_tokens=6,
    deadline_in_ms=-30, stream_id=8, whole=True, waits_for="MARKER", ended=True, finished_ms=11,
    choices=(
        ChoiceView(
            choice=1, log_token_offset=2, log_text_offset=3, cursor_token_offset=4, blocks=5, idle_ms=6, phase="DECODE",
            finish_reason="STOP", held_for_stop=7, incomplete_character=True, preemptions=8,
        ),
    ),
)  # fmt: skip

PROCESS = ProcessView(
    name="scheduler-1", service="scheduler", phase="serving", ready=True, not_ready_why="why", uptime_ms=1,
    unix_us=1 << 60, output_tokens=2,
    hops=(
        HopView(
            what="text", sender="d:1", scheduler="s:1", hello=Hello(epoch=3, model_id="m"), up=True, why_not="x",
            since_ms=4, silent_ms=5, route=ROUTE, calls=6,
        ),
    ),
    scheduler=SchedulerView(
        waiting=1, running=2, running_max=3, free_blocks=4, cached_blocks=5, total_blocks=6, block_size=7, step_ms=8,
        stepped_ms=9, stalled=True, routes=(RouteView(route=ROUTE, read=True, sequences=3),),
    ),
)  # fmt: skip


def test_a_request_survives_the_wire_with_every_field_set_and_with_none() -> None:
    unset = [
        field.name
        for field in fields(RequestView)
        if field.default is not MISSING and getattr(REQUEST, field.name) == field.default
    ]
    assert not unset, "a new field belongs into this test"
    assert request_from_wire(request_to_wire(REQUEST)) == REQUEST
    assert request_from_wire(request_to_wire(RequestView())) == RequestView()


def test_what_is_at_its_default_is_not_on_the_wire() -> None:
    assert request_to_wire(RequestView()) == admin_pb2.RequestView()
    assert request_to_wire(RequestView(finished_ms=0)).HasField("finished_ms")


def test_a_process_survives_the_wire() -> None:
    assert process_from_wire(process_to_wire(PROCESS)) == PROCESS
    between_steps = ProcessView(scheduler=SchedulerView())
    assert process_from_wire(process_to_wire(between_steps)) == between_steps
