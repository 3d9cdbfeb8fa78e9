from itertools import product

import pytest

from services.scheduler.state import (
    ATTEMPT_TRANSITIONS,
    LEASE_TRANSITIONS,
    SEQUENCE_TRANSITIONS,
    AttemptEvent,
    AttemptPhase,
    LeaseEvent,
    LeasePhase,
    SequenceEvent,
    SequencePhase,
    UnexpectedEvent,
    next_attempt_phase,
    next_lease_phase,
    next_sequence_phase,
)


@pytest.mark.parametrize(("phase", "event"), list(product(SequencePhase, SequenceEvent)))
def test_every_pair_of_sequence_phase_and_event_is_in_the_table_or_raises(
    phase: SequencePhase, event: SequenceEvent
) -> None:
    if (phase, event) in SEQUENCE_TRANSITIONS:
        assert next_sequence_phase(phase, event) is SEQUENCE_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent, match=event.name):
            next_sequence_phase(phase, event)


@pytest.mark.parametrize(("phase", "event"), list(product(AttemptPhase, AttemptEvent)))
def test_every_pair_of_attempt_phase_and_event_is_in_the_table_or_raises(
    phase: AttemptPhase, event: AttemptEvent
) -> None:
    if (phase, event) in ATTEMPT_TRANSITIONS:
        assert next_attempt_phase(phase, event) is ATTEMPT_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent, match=event.name):
            next_attempt_phase(phase, event)


@pytest.mark.parametrize(("phase", "event"), list(product(LeasePhase, LeaseEvent)))
def test_every_pair_of_lease_phase_and_event_is_in_the_table_or_raises(phase: LeasePhase, event: LeaseEvent) -> None:
    if (phase, event) in LEASE_TRANSITIONS:
        assert next_lease_phase(phase, event) is LEASE_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent, match=event.name):
            next_lease_phase(phase, event)


def test_a_claim_moves_no_attempt_to_another_phase() -> None:
    claims = {phase: after for (phase, event), after in ATTEMPT_TRANSITIONS.items() if event is AttemptEvent.CLAIM}
    assert claims == {phase: phase for phase in (AttemptPhase.ACCEPTED, AttemptPhase.ENDED)}


def test_an_ended_sequence_never_moves_again() -> None:
    assert not [event for phase, event in SEQUENCE_TRANSITIONS if phase is SequencePhase.ENDED]


def test_an_end_is_possible_from_every_phase_before_it() -> None:
    ends = {phase for phase, event in SEQUENCE_TRANSITIONS if event is SequenceEvent.END}
    assert ends == set(SequencePhase) - {SequencePhase.ENDED}


def test_a_released_attempt_comes_back_only_after_it_was_forgotten() -> None:
    leaves = {
        event
        for (phase, event), after in ATTEMPT_TRANSITIONS.items()
        if phase is AttemptPhase.RELEASED and after is not AttemptPhase.RELEASED
    }
    assert leaves == {AttemptEvent.FORGET}


def test_retries_of_submit_abort_and_release_are_expected_in_every_phase() -> None:
    for phase, event in product(AttemptPhase, (AttemptEvent.SUBMIT, AttemptEvent.ABORT, AttemptEvent.RELEASE)):
        assert isinstance(next_attempt_phase(phase, event), AttemptPhase)
