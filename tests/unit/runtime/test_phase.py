from itertools import product

import pytest

from services.runtime.phase import TRANSITIONS, Phase, PhaseEvent, UnexpectedPhaseEvent, next_phase

# Written out once more, by hand: the table must not be its own witness.
KNOWN = {
    ("STARTING", "STARTED"): "SERVING",
    ("STARTING", "DRAIN"): "DRAINING",
    ("STARTING", "STOP"): "STOPPED",
    ("SERVING", "DRAIN"): "DRAINING",
    ("SERVING", "STOP"): "STOPPED",
    ("DRAINING", "STOP"): "STOPPED",
}


@pytest.mark.parametrize(("phase", "event"), list(product(Phase, PhaseEvent)))
def test_every_pair_of_phase_and_event_leads_where_it_should_or_raises(phase: Phase, event: PhaseEvent) -> None:
    expected = KNOWN.get((phase.name, event.name))
    if expected is None:
        with pytest.raises(UnexpectedPhaseEvent, match=f"{event.name} while {phase.name}"):
            next_phase(phase, event)
    else:
        assert next_phase(phase, event).name == expected


def test_every_phase_is_reached_and_every_one_but_the_last_is_left() -> None:
    assert {Phase.STARTING, *TRANSITIONS.values()} == set(Phase)
    assert {phase for phase, _ in TRANSITIONS} == set(Phase) - {Phase.STOPPED}
