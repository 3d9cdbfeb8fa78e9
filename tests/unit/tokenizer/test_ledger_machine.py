"""The ledger under any order of events: one answer to an opener, one finish per choice, one completion."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.protocol.events import Completed, Delta, Finish, FinishReason
from services.protocol.request import OnDisconnect
from services.tokenizer.state import EnginePhase
from tests.unit.tokenizer.world import SCHEDULER, Caller, World, text_of

pick = st.integers(0, 50)
yes_or_no = st.booleans()


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of random requests."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(max_open=12)
        self.world.connect()

    @rule(number=st.integers(0, 3), n=st.integers(1, 3), timeout_s=st.sampled_from([None, 0.5, 3.0]))
    def open(self, number: int, n: int, timeout_s: float | None) -> None:
        self.world.open(f"r{number}", n, timeout_s)

    @rule(number=st.integers(0, 3), n=st.integers(1, 2), detach=yes_or_no, retain_ms=st.sampled_from([0, 2000]))
    def open_to_be_kept(self, number: int, n: int, detach: bool, retain_ms: int) -> None:
        kept = OnDisconnect.DETACH if detach else OnDisconnect.ABORT
        self.world.open(f"r{number}", n, on_disconnect=kept, retain_ms=retain_ms)

    @precondition(lambda self: self.away())
    @rule(at=pick, count=st.integers(0, 20))
    def caller_comes_back(self, at: int, count: int) -> None:
        self.world.come_back(self.away()[at % len(self.away())], count)

    @precondition(lambda self: self.world.route is not None)
    @rule()
    def scheduler_is_given_up(self) -> None:
        self.world.cut()
        self.world.perform(self.world.attempts.scheduler_lost(SCHEDULER, self.world.now))

    @precondition(lambda self: self.world.submits)
    @rule(at=pick, answered=yes_or_no)
    def submit_arrives(self, at: int, answered: bool) -> None:
        submits = self.world.submits
        self.world.arrive_submit(submits[at % len(submits)], answered=answered)

    @precondition(lambda self: self.world.aborts)
    @rule(at=pick)
    def abort_arrives(self, at: int) -> None:
        self.world.arrive_abort(self.world.aborts[at % len(self.world.aborts)])

    @precondition(lambda self: self.world.releases)
    @rule(at=pick, answered=yes_or_no)
    def release_arrives(self, at: int, answered: bool) -> None:
        releases = list(self.world.releases)
        self.world.arrive_release(releases[at % len(releases)], answered=answered)

    @precondition(lambda self: self.world.answers)
    @rule(at=pick)
    def answer_arrives(self, at: int) -> None:
        self.world.arrive_answer(at % len(self.world.answers))

    @precondition(lambda self: self.world.running())
    @rule(at=pick, count=st.integers(1, 3))
    def engine_generates(self, at: int, count: int) -> None:
        running = self.world.running()
        for _ in range(count):
            self.world.generate(running[at % len(running)])

    @precondition(lambda self: self.world.running())
    @rule(at=pick, reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH, FinishReason.ERROR]))
    def engine_ends(self, at: int, reason: FinishReason) -> None:
        running = self.world.running()
        self.world.end(running[at % len(running)], reason)

    @precondition(lambda self: self.world.running())
    @rule(at=pick)
    def stop_text_found(self, at: int) -> None:
        running = self.world.running()
        self.world.stop_text(running[at % len(running)])

    @precondition(lambda self: self.world.sequences and self.world.route is not None)
    @rule(at=pick)
    def pipe_repeats_itself(self, at: int) -> None:
        sequences = list(self.world.sequences.values())
        self.world.resend(sequences[at % len(sequences)])

    @precondition(lambda self: self.world.pipe)
    @rule(count=st.integers(1, 8))
    def pipe_arrives(self, count: int) -> None:
        for _ in range(count):
            self.world.pump()

    @precondition(lambda self: self.world.route is not None)
    @rule()
    def route_lost(self) -> None:
        self.world.cut()

    @rule()
    def route_opened(self) -> None:
        self.world.connect()

    @precondition(lambda self: self.world.route is not None)
    @rule()
    def reconciles(self) -> None:
        self.world.reconcile()

    @precondition(lambda self: self.world.sequences)
    @rule()
    def scheduler_restarts(self) -> None:
        self.world.restart()

    @rule(refuses=yes_or_no)
    def scheduler_fills(self, refuses: bool) -> None:
        self.world.refuses = refuses

    @precondition(lambda self: self.waiting())
    @rule(at=pick)
    def caller_leaves(self, at: int) -> None:
        self.world.leave(self.waiting()[at % len(self.waiting())])

    @precondition(lambda self: self.waiting())
    @rule(at=pick)
    def caller_takes_its_end(self, at: int) -> None:
        self.world.deliver(self.waiting()[at % len(self.waiting())])

    @rule(number=st.integers(0, 4))
    def abort_comes(self, number: int) -> None:
        self.world.abort(f"r{number}")

    @rule(seconds=st.sampled_from([0.1, 1.1, 3.5, 11.0]))
    def time_passes(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    @invariant()
    def an_opener_is_answered_at_most_once(self) -> None:
        assert all(len(caller.answers) <= 1 for caller in self.world.callers.values())

    @invariant()
    def what_a_caller_read_is_in_order_once_and_ends_once(self) -> None:
        for caller in self.world.callers.values():
            check_events(caller)

    @invariant()
    def an_answer_is_whole_at_most_once_and_never_spoiled_by_replay(self) -> None:
        assert len(self.world.finished) == len(set(self.world.finished))
        assert not self.world.spoiled

    @invariant()
    def what_is_forgotten_is_over_on_both_sides(self) -> None:
        for entry, caller in self.world.callers.items():
            assert caller.forgotten == int(entry.forgotten)
            if entry.forgotten:
                assert entry not in list(self.world.ledger)
                assert entry.caller_is_final
                assert all(attempt.phase is EnginePhase.RELEASED for attempt in entry.attempts)

    def waiting(self) -> list[Caller]:
        return [caller for caller in self.world.callers.values() if not caller.final]

    def away(self) -> list[Caller]:
        return [caller for caller in self.world.callers.values() if caller.final and caller.answers == ["accepted"]]

    def teardown(self) -> None:
        self.world.refuses = False
        self.world.settle()
        assert not len(self.world.ledger), [(e.caller, [(a.phase, a) for a in e.attempts]) for e in self.world.ledger]
        assert not list(self.world.ledger.attempts)
        assert not self.world.sequences, "the scheduler still holds something"
        assert self.world.retention.reserved_bytes == 0
        for caller in self.world.callers.values():
            assert caller.forgotten == 1
            assert len(caller.answers) == 1
            check_events(caller)
        super().teardown()


def check_events(caller: Caller) -> None:
    """Joined deltas are what the engine gave; one finish per choice, then one completion, then nothing."""
    ended: set[int] = set()
    ids: dict[int, list[int]] = {}
    text: dict[int, str] = {}
    for at, event in enumerate(caller.events):
        match event:
            case Delta():
                assert event.choice not in ended
                ids[event.choice] = [*ids.get(event.choice, []), *event.token_ids]
                text[event.choice] = text.get(event.choice, "") + event.text
                assert event.next_token_offset == len(ids[event.choice])
                assert event.next_text_offset == len(text[event.choice])
            case Finish():
                assert event.choice not in ended
                ended.add(event.choice)
                assert event.output_tokens == len(ids.get(event.choice, []))
            case Completed():
                assert at == len(caller.events) - 1
                assert len(ended) == caller.entry.pinned.request.n
                assert event.usage.output_tokens == sum(map(len, ids.values()))
    for choice, tokens in ids.items():
        assert tokens == [100 + index for index in range(len(tokens))]
        assert text[choice] == "".join(text_of(tokens))


LedgerMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=50)
TestLedgerMachine = LedgerMachine.TestCase
