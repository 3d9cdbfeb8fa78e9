from __future__ import annotations

from itertools import product

import pytest

from services.tokenizer.state import (
    CALLER_FINAL,
    CALLER_TRANSITIONS,
    ENGINE_TRANSITIONS,
    CallerEvent,
    CallerPhase,
    EngineEvent,
    EnginePhase,
    UnexpectedEvent,
    after_caller,
    after_engine,
)


@pytest.mark.parametrize(("phase", "event"), list(product(CallerPhase, CallerEvent)))
def test_every_caller_pair_moves_as_the_table_says_or_raises(phase: CallerPhase, event: CallerEvent) -> None:
    if (phase, event) in CALLER_TRANSITIONS:
        assert after_caller(phase, event) is CALLER_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent, match=f"{event.name} while {phase.name}"):
            after_caller(phase, event)


@pytest.mark.parametrize(("phase", "event"), list(product(EnginePhase, EngineEvent)))
def test_every_engine_pair_moves_as_the_table_says_or_raises(phase: EnginePhase, event: EngineEvent) -> None:
    if (phase, event) in ENGINE_TRANSITIONS:
        assert after_engine(phase, event) is ENGINE_TRANSITIONS[phase, event]
    else:
        with pytest.raises(UnexpectedEvent, match=f"{event.name} while {phase.name}"):
            after_engine(phase, event)


def test_nothing_leaves_a_final_phase() -> None:
    assert not [phase for phase, _ in CALLER_TRANSITIONS if phase in CALLER_FINAL]
    assert not [phase for phase, _ in ENGINE_TRANSITIONS if phase is EnginePhase.RELEASED]


def test_a_final_phase_can_be_reached_from_every_phase() -> None:
    assert _reaching({EnginePhase.RELEASED}, ENGINE_TRANSITIONS) == set(EnginePhase)
    assert _reaching(set(CALLER_FINAL), CALLER_TRANSITIONS) == set(CallerPhase)


def test_a_lost_scheduler_releases_an_attempt_in_every_phase_but_the_last() -> None:
    for phase in set(EnginePhase) - {EnginePhase.RELEASED}:
        assert after_engine(phase, EngineEvent.LOST) is EnginePhase.RELEASED


def test_an_attempt_is_forgotten_by_release_alone_once_the_scheduler_has_it() -> None:
    into = {phase for (phase, event), after in ENGINE_TRANSITIONS.items() if after is EnginePhase.RELEASED
            and event in (EngineEvent.RELEASED, EngineEvent.REFUSED)}  # fmt: skip
    assert into == {EnginePhase.SUBMITTING, EnginePhase.RELEASING}


def _reaching(goal: set, table: dict) -> set:
    """Every phase from which one of the goal's can be reached."""
    reaching = set(goal)
    while more := {before for (before, _), after in table.items() if after in reaching} - reaching:
        reaching |= more
    return reaching
