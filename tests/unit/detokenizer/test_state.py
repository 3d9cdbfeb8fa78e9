"""The whole product of phases and happenings."""

from __future__ import annotations

from itertools import product

import pytest

from services.detokenizer.state import TRANSITIONS, Happening, Phase, ProtocolError, after


@pytest.mark.parametrize(("phase", "happening"), list(product(Phase, Happening)))
def test_what_is_not_in_the_table_is_a_protocol_error(phase: Phase, happening: Happening) -> None:
    if (phase, happening) in TRANSITIONS:
        assert after(phase, happening) is TRANSITIONS[phase, happening]
    else:
        with pytest.raises(ProtocolError, match=f"{happening.name} after {phase.name}"):
            after(phase, happening)


def test_a_sequence_finishes_once_and_ends_once() -> None:
    """Both leave OPEN for good, so one finish; ENDED is left by nothing, so one end."""
    assert all(target is not Phase.OPEN for (source, _), target in TRANSITIONS.items() if source is not Phase.OPEN)
    assert all(source is not Phase.ENDED for source, _ in TRANSITIONS)
