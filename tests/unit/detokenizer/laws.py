"""The promises of the return path's text, each as a check of one random case: for every tokenizer the same ones."""

from __future__ import annotations

from collections.abc import Callable

from services.detokenizer.batch import SequenceEnd, SequenceStart
from services.detokenizer.core import Core
from services.protocol.events import FinishReason
from tests.unit.detokenizer.oracle import End, told
from tests.unit.detokenizer.route import Received, Route, run, split
from tests.unit.detokenizer.texts import Case


def what_has_left_depends_on_the_tokens_so_far_and_the_plan_alone(case: Case) -> None:
    """After every delta of a random split it is what the definition says of that many tokens, and only ever more."""
    route = Route(case.vocabulary, case.plan)
    for delta in split(case.ids, case.cuts):
        before = route.received.told
        route.give(delta)
        now = route.received.told
        assert now.text.startswith(before.text)
        assert now.ids[: len(before.ids)] == before.ids
        assert now == told(case.vocabulary, case.plan, case.ids[: route.sent])
    route.end(case.end)
    assert route.received.told == told(case.vocabulary, case.plan, case.ids, case.end)


def the_whole_is_the_same_in_any_steps(case: Case) -> None:
    """One token at a time, two, eight, all at once: joined, it is one text with one finish."""
    steps = [split(case.ids, range(0, len(case.ids), step)) for step in (1, 2, 8, len(case.ids) + 1)]
    wholes = [run(case.vocabulary, case.plan, deltas, case.end).told for deltas in steps]
    assert wholes[0].finish is not None
    assert wholes == [wholes[0]] * len(steps)


def text_never_runs_ahead_of_its_ids(case: Case) -> None:
    """The ids that have left give, on their own, at least the text that has left."""
    route = Route(case.vocabulary, case.plan)
    for token_id in case.ids:
        route.give([token_id])
        sent = route.received.told
        if sent.finish is not None:
            return
        alone = told(case.vocabulary, case.plan, sent.ids, End(FinishReason.LENGTH))
        assert alone.text.startswith(sent.text)


def a_neighbour_changes_nothing(one: Case, other: Case) -> None:
    """Two sequences of one route, in turn, with plans of their own: each has what it has alone."""
    core = Core(one.vocabulary)
    pair = [one, other]
    for number, case in enumerate(pair):
        core.start(SequenceStart(sequence=number, attempt_id=number, choice=0, plan=case.plan))
    for place in range(max(len(case.ids) for case in pair)):
        for number, case in enumerate(pair):
            if place < len(case.ids):
                core.column([number], [place], [case.ids[place]])
    for number, case in enumerate(pair):
        core.end(SequenceEnd(sequence=number, token_offset=len(case.ids), reason=case.end.reason, stop=case.end.stop))
    batch = core.take()
    assert batch is not None
    for number, case in enumerate(pair):
        received = Received()
        received.take(number, batch)
        assert received.told == told(case.vocabulary, case.plan, case.ids, case.end)


OF_ONE: tuple[Callable[[Case], None], ...] = (
    what_has_left_depends_on_the_tokens_so_far_and_the_plan_alone,
    the_whole_is_the_same_in_any_steps,
    text_never_runs_ahead_of_its_ids,
)
