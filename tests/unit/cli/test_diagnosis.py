from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from cli.diagnosis import RULES, diagnose
from cli.diagnosis.finding import Severity, in_words
from cli.doctor import Diagnosis, needs_another_look
from cli.loop import Process, Snapshot
from services.protocol.hello import Hello
from services.protocol.views import (
    ChoiceView,
    HopView,
    ProcessView,
    ReaderView,
    RequestView,
    RouteKey,
    RouteView,
    SchedulerView,
)

NOW_US = 1_000_000_000
ROUTE = RouteKey(tokenizer="tokenizer", tokenizer_epoch=2, generation=1)
EPOCHS = {"gateway": 1, "tokenizer": 2, "detokenizer": 3, "scheduler": 4}
SENDERS = {"gateway": ("events", 2), "tokenizer": ("text", 4), "detokenizer": ("tokens", 4)}


class World:
    """A healthy loop with one request that has come to `tokens`; a test changes what it wants."""

    def __init__(self, tokens: int = 10) -> None:
        self.hello = {name: Hello(epoch=epoch, model_id="m") for name, epoch in EPOCHS.items()}
        self.hello["gateway"] = Hello(epoch=1)
        self.process = {
            name: ProcessView(name=name, service=name, ready=True, phase="serving", unix_us=NOW_US) for name in EPOCHS
        }
        for name, (what, epoch) in SENDERS.items():
            hop = HopView(what=what, sender="peer:1", hello=Hello(epoch=epoch), up=True, since_ms=9000, silent_ms=100)
            self.process[name] = replace(self.process[name], hops=(hop,))
        self.scheduler(running=1, running_max=8, total_blocks=64, free_blocks=60, stepped_ms=3,
                       routes=(RouteView(route=ROUTE, read=True, sequences=1),))  # fmt: skip
        choice = ChoiceView(choice=0, log_token_offset=tokens, cursor_token_offset=tokens)
        self.requests: dict[str, list[RequestView]] = {
            "gateway": [RequestView(request_id="r", stream_id=5, caller_phase="OPEN", choices=[choice], age_ms=9000)],
            "tokenizer": [
                RequestView(
                    request_id="r", attempt_id=7, caller_phase="OPEN", engine_phase="RUNNING", upstream_epoch=4,
                    age_ms=9000, choices=[choice],
                    readers=[ReaderView(gateway_epoch=1, stream_id=5, token_offsets=[tokens])],
                )
            ],
            "detokenizer": [RequestView(attempt_id=7, route=ROUTE, choices=[replace(choice, phase="OPEN")])],
            "scheduler": [
                RequestView(
                    request_id="r", attempt_id=7, engine_phase="DECODE", route=ROUTE, choices=[choice], age_ms=9000
                )
            ],
        }  # fmt: skip
        self.silent: dict[str, Process] = {}

    def scheduler(self, **changes: Any) -> World:
        view = self.process["scheduler"]
        self.process["scheduler"] = replace(view, scheduler=replace(view.scheduler or SchedulerView(), **changes))
        return self

    def at(self, name: str, *, log: int | None = None, cursor: int | None = None, **changes: Any) -> World:
        """Where the request stands at one service, or anything else that its view says."""
        [view] = self.requests[name]
        [choice] = view.choices
        choice = replace(
            choice,
            log_token_offset=choice.log_token_offset if log is None else log,
            cursor_token_offset=choice.cursor_token_offset if cursor is None else cursor,
        )
        of_choice = {key: changes.pop(key) for key in ("phase", "idle_ms") if key in changes}
        choice = replace(choice, **of_choice)
        self.requests[name] = [replace(view, choices=[choice], **changes)]
        return self

    def told(self, tokens: int) -> World:
        return self.at("tokenizer", readers=[ReaderView(gateway_epoch=1, stream_id=5, token_offsets=[tokens])])

    def hop(self, name: str, **changes: Any) -> World:
        [hop] = self.process[name].hops
        self.process[name] = replace(self.process[name], hops=(replace(hop, **changes),))
        return self

    def mute(self, name: str, *, hangs: bool) -> World:
        self.silent[name] = Process(address=f"{name}:1", known=name, why_not="nobody listens there", hangs=hangs)
        return self

    def seen(self) -> Snapshot:
        return Snapshot(
            0.0,
            [
                self.silent.get(name)
                or Process(
                    address=f"{name}:1", known=name, hello=self.hello[name], view=self.process[name],
                    requests=self.requests[name], total=len(self.requests[name]),
                )
                for name in EPOCHS
            ],
        )  # fmt: skip


def codes(before: World, now: World | None = None) -> list[str]:
    """What is found where nothing, or what `now` says, changed between the looks."""
    return [finding.code for finding in diagnose(before.seen(), (now or before).seen())]


def test_a_healthy_loop_gives_no_finding() -> None:
    assert codes(World(10), World(20)) == []
    assert codes(World(10)) == [], "a request that makes no token between two looks is not stuck yet"


def ended(caller: str, waits_for: str) -> Callable[[World], object]:
    return lambda world: world.at(
        "tokenizer", caller_phase=caller, waits_for=waits_for, engine_phase="RELEASING", finished_ms=4000, readers=[]
    )


@pytest.mark.parametrize(
    ("change", "code", "link"),
    [
        (lambda w: w.mute("detokenizer", hangs=True), "PROCESS_HANGS", "detokenizer"),
        (lambda w: w.mute("scheduler", hangs=False), "PROCESS_DOWN", "scheduler"),
        (lambda w: w.hop("gateway", up=False, why_not="refused", since_ms=900), "HOP_DOWN", "tokenizer → gateway"),
        (lambda w: w.hop("tokenizer", silent_ms=1800), "HOP_SILENT", "detokenizer → tokenizer"),
        (lambda w: w.hop("detokenizer", silent_ms=1800), "HOP_SILENT", "scheduler → detokenizer"),
        (lambda w: w.hop("gateway", hello=Hello(epoch=99)), "UNKNOWN_PEER", "tokenizer → gateway"),
        (lambda w: w.at("scheduler", log=15, cursor=12), "NOT_SENT", "scheduler → detokenizer → tokenizer"),
        (lambda w: w.at("scheduler", log=15, cursor=15), "NOT_RECEIVED", "scheduler → detokenizer"),
        pytest.param(
            lambda w: w.at("scheduler", log=15, cursor=15).requests.update(detokenizer=[]), "NOT_RECEIVED",
            "scheduler → detokenizer → tokenizer", id="no detokenizer has it",
        ),
        (lambda w: w.at("scheduler", log=15, cursor=15).at("detokenizer", log=15), "HELD_BACK", "detokenizer"),
        (lambda w: w.at("detokenizer", log=12, cursor=12), "TEXT_NOT_RECEIVED", "detokenizer → tokenizer"),
        (lambda w: w.told(8).at("gateway", log=8, cursor=8), "EVENTS_NOT_SENT", "tokenizer → gateway"),
        (lambda w: w.at("gateway", log=8, cursor=8), "EVENTS_NOT_RECEIVED", "tokenizer → gateway"),
        (lambda w: w.at("gateway", cursor=3, waits_for="CALLER", idle_ms=2500), "CALLER_READS_NOT", "gateway → caller"),
        pytest.param(
            lambda w: w.at("gateway", caller_phase="ENDED", waits_for="CALLER"), "CALLER_READS_NOT", "gateway → caller",
            id="only its end is not taken",
        ),
        (lambda w: w.at("tokenizer", readers=[ReaderView(token_offsets=[4])]), "CALLER_READS_NOT",
         "tokenizer → caller"),
        (ended("FINISHED", "RELEASE_ANSWER"), "UNRELEASED_RELEASE_ANSWER", "tokenizer → scheduler"),
        (ended("GONE", "MARKER"), "UNRELEASED_MARKER", "scheduler → detokenizer → tokenizer"),
        (lambda w: w.requests.update(gateway=[]), "STREAM_RELEASE_OWED", "gateway → tokenizer"),
        (lambda w: w.at("tokenizer", engine_phase="SUBMITTING"), "SUBMIT_UNANSWERED", "tokenizer → scheduler"),
        (lambda w: w.at("tokenizer", waits_for="SCHEDULER"), "NO_SCHEDULER", "tokenizer → scheduler"),
        (lambda w: w.requests.update(tokenizer=[], gateway=[]), "ATTEMPT_ORPHANED", "scheduler → tokenizer"),
        (lambda w: w.scheduler(step_ms=40_000, stalled=True), "STEP_STALLED", "scheduler"),
        (lambda w: w.scheduler(step_ms=6_000), "LONG_STEP", "scheduler"),
    ],
)  # fmt: skip
def test_each_stall_is_named_by_its_link(change: Callable[[World], object], code: str, link: str) -> None:
    world = World()
    change(world)
    first = diagnose(world.seen(), world.seen())[0]
    assert (first.code, first.link) == (code, link)
    assert first.what
    assert first.advice


def test_a_hop_that_is_down_names_the_requests_that_no_detokenizer_has() -> None:
    world = World().at("scheduler", log=15, cursor=15).hop("detokenizer", up=False, why_not="silent", since_ms=900)
    world.requests.update(detokenizer=[])
    [finding] = diagnose(world.seen(), world.seen())
    assert (finding.code, finding.link, list(finding.requests)) == ("HOP_DOWN", "scheduler → detokenizer", ["r"])


def test_a_hop_that_brings_what_is_old_is_busy_and_not_stuck() -> None:
    late, later = World(10).hop("tokenizer", lag_ms=3000), World(20).hop("tokenizer", lag_ms=4000)
    [finding] = diagnose(late.seen(), later.seen())
    assert (finding.code, finding.severity, finding.link) == ("HOP_LAGS", Severity.BUSY, "detokenizer → tokenizer")
    assert "4.0 s late" in finding.what
    assert codes(World(10), later) == [], "one late message is no lag"


@pytest.mark.parametrize("reason", ["BLOCKS", "BATCH", "TURN"])
def test_a_queue_is_busy_and_not_stuck_and_says_what_it_waits_for(reason: str) -> None:
    world = World(0).at("scheduler", engine_phase="WAITING", waits_for=reason, idle_ms=2600)
    [finding] = diagnose(world.seen(), world.seen())
    assert (finding.code, finding.severity, finding.since_ms) == (f"QUEUED_{reason}", Severity.BUSY, 2600)
    world = World(0).at("scheduler", engine_phase="WAITING", waits_for=reason, idle_ms=600)
    assert codes(world) == [], "everybody waits for a moment"


@pytest.mark.parametrize(
    "changes",
    [{"model_id": "other"}, {"tokenizer_digest": b"other"}, {"protocol_version": 9}],
    ids=["model", "tokenizer", "protocol"],
)
def test_processes_that_do_not_fit_are_named(changes: dict[str, Any]) -> None:
    world = World()
    world.hello["tokenizer"] = replace(world.hello["tokenizer"], tokenizer_digest=b"ours")
    world.hello["scheduler"] = replace(world.hello["scheduler"], **changes)
    finding = diagnose(world.seen(), world.seen())[0]
    assert (finding.code, finding.link) == ("MISMATCH", "tokenizer ↔ scheduler")


def test_what_moved_between_the_looks_is_not_stuck() -> None:
    assert codes(World().at("gateway", log=8, cursor=8), World().at("gateway", log=9, cursor=9)) == []


def test_a_link_is_blamed_once_and_not_what_follows_from_it() -> None:
    world = World().hop("detokenizer", silent_ms=1800).at("scheduler", log=15, cursor=15)
    assert codes(world) == ["HOP_SILENT"]
    world = World().mute("scheduler", hangs=True).hop("detokenizer", silent_ms=1800)
    assert codes(world) == ["PROCESS_HANGS"]


@pytest.mark.parametrize("receiver", ["detokenizer", "tokenizer"])
def test_a_hop_that_is_down_explains_what_its_whole_route_does_not_bring_and_names_whom_it_concerns(
    receiver: str,
) -> None:
    world = World().hop(receiver, up=False, why_not="refused", since_ms=900).at("scheduler", log=15, cursor=0)
    [finding] = diagnose(world.seen(), world.seen())
    assert (finding.code, list(finding.requests)) == ("HOP_DOWN", ["r"])


def test_a_process_explains_nothing_of_one_whose_name_ends_like_its_own() -> None:
    world = World().mute("tokenizer", hangs=True).hop("detokenizer", silent_ms=1800)
    assert codes(world) == ["PROCESS_HANGS", "HOP_SILENT"]


def test_text_that_cannot_come_because_no_tokens_do_is_not_the_detokenizers_fault() -> None:
    world = World().hop("detokenizer", sender="s:1", up=False, since_ms=900)
    world.hop("tokenizer", scheduler="s:1", up=False, since_ms=900, why_not="silent for 2 s")
    assert codes(world) == ["HOP_DOWN"]
    [finding] = diagnose(world.seen(), world.seen())
    assert finding.link == "scheduler → detokenizer"


def test_an_answer_that_is_wanted_whole_is_not_stuck_before_it_is() -> None:
    world = World().told(0).at("tokenizer", whole=True).at("gateway", log=0, cursor=0)
    assert codes(world) == []


def test_a_sequence_cut_by_a_stop_text_may_be_behind_its_engine() -> None:
    assert codes(World().at("scheduler", log=20, cursor=20).at("detokenizer", phase="FINISHED")) == []


def test_a_marker_that_is_behind_text_which_comes_is_late_and_not_lost() -> None:
    before, now = World(), World()
    for world, tokens in ((before, 100), (now, 200)):
        ended("FINISHED", "MARKER")(world)
        world.process["tokenizer"] = replace(world.process["tokenizer"], output_tokens=tokens)
    [finding] = diagnose(before.seen(), now.seen())
    assert (finding.code, finding.severity) == ("UNRELEASED_MARKER", Severity.BUSY)


def test_a_process_that_is_not_ready_is_told_only_where_nothing_explains_it() -> None:
    world = World()
    world.process["gateway"] = replace(world.process["gateway"], ready=False, not_ready_why="starting")
    assert codes(world) == ["NOT_READY"]
    assert codes(world.mute("scheduler", hangs=True)) == ["PROCESS_HANGS"]


def test_a_late_answer_is_no_hang_until_it_is_late_again() -> None:
    assert codes(World(), World().mute("gateway", hangs=True)) == []


def test_two_looks_settle_what_is_healthy_and_no_silence_that_begins_between_them() -> None:
    def unsettled(before: World, now: World, seconds: float = 0.5) -> bool:
        first, second = before.seen(), replace(now.seen(), at=seconds)
        return needs_another_look(Diagnosis(diagnose(first, second), first, second))

    assert not unsettled(World(10), World(20))
    assert unsettled(World(), World().mute("gateway", hangs=True)), "it may be late, or hang"
    hung = World().mute("gateway", hangs=True)
    assert not unsettled(hung, hung, seconds=2.0), "it was waited for twice"
    assert unsettled(World().at("scheduler", log=15, cursor=12), World().at("scheduler", log=15, cursor=12))


def test_every_rule_is_a_pure_function_of_two_looks() -> None:
    world = World().at("scheduler", log=15, cursor=12)
    assert len({rule.__name__ for rule in RULES}) == len(RULES)
    assert diagnose(world.seen(), world.seen()) == diagnose(world.seen(), world.seen())


@pytest.mark.parametrize(
    ("ms", "words"), [(3, "3 ms"), (1500, "1.5 s"), (61_000, "1 min 1 s"), (3_660_000, "1 h 1 min")]
)
def test_durations_are_words(ms: int, words: str) -> None:
    assert in_words(ms) == words
