from __future__ import annotations

from itertools import product

import pytest

from gateway.state import (
    LINK_TRANSITIONS,
    STREAM_TRANSITIONS,
    LinkEvent,
    LinkPhase,
    StreamEvent,
    StreamPhase,
    UnexpectedEvent,
    next_link_phase,
    next_stream_phase,
)


@pytest.mark.parametrize(("phase", "event"), list(product(LinkPhase, LinkEvent)))
def test_a_link_moves_only_as_the_table_says(phase: LinkPhase, event: LinkEvent) -> None:
    if (phase, event) in LINK_TRANSITIONS:
        assert next_link_phase(phase, event) is LINK_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent):
            next_link_phase(phase, event)


@pytest.mark.parametrize(("phase", "event"), list(product(StreamPhase, StreamEvent)))
def test_a_stream_moves_only_as_the_table_says(phase: StreamPhase, event: StreamEvent) -> None:
    if (phase, event) in STREAM_TRANSITIONS:
        assert next_stream_phase(phase, event) is STREAM_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent):
            next_stream_phase(phase, event)


def test_nothing_follows_a_closed_stream() -> None:
    assert not [pair for pair in STREAM_TRANSITIONS if pair[0] is StreamPhase.CLOSED]


def test_new_requests_go_to_no_phase_that_a_lost_link_can_be_in() -> None:
    assert {after for (_, event), after in LINK_TRANSITIONS.items() if event is LinkEvent.LOST} == {LinkPhase.DOWN}
