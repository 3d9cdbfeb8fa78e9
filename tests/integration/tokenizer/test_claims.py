"""A tokenizer that is killed, stopped or drained in the middle of streams, and another one that claims its requests.

The scheduler and the detokenizer are real ones in the test's loop, and so are those who claim; who dies is a process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from cli.stack import free_ports
from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.runtime.app import Runtime
from services.runtime.client import connect
from services.runtime.errors import AlreadyExists, InvalidRequest, NotFound, TailraceError, from_rpc_error
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config
from tailrace.v1 import admin_pb2, admin_pb2_grpc, common_pb2, generation_pb2, generation_pb2_grpc, tokenizer_pb2_grpc
from tests.integration.tokenizer.gateway import Gateway, Stream
from tests.integration.tokenizer.test_deaths import check_same
from tests.integration.tokenizer.test_real_services import FREE, _process, _ready
from tests.killable import Killable

STREAMS = 12
TOKENS = 150
Options = generation_pb2.GenerationOptions


@dataclass
class Claimer:
    """A tokenizer in the test's loop, which is there to claim."""

    app: TokenizerApp
    runtime: Runtime
    gateway: Gateway
    generation: generation_pb2_grpc.GenerationServiceAsyncStub

    def metric(self, name: str, **labels: str) -> float | None:
        """One of its metrics."""
        return self.runtime.registry.get_sample_value(f"tailrace_tokenizer_{name}", labels)


@dataclass
class System:
    """All of them. `victim` is the tokenizer that has the requests at first, `gateway` reads there."""

    scheduler: SchedulerApp
    victim: Killable
    gateway: Gateway
    generation: generation_pb2_grpc.GenerationServiceAsyncStub
    claimers: list[Claimer]

    @property
    def core(self) -> SchedulerCore:
        """The scheduler's."""
        assert self.scheduler._serving is not None
        return self.scheduler._serving.loop.core

    async def open(self, gateway: Gateway, first: int = 0) -> dict[int, generation_pb2.Started]:
        """The same requests each time, on streams from `first` on."""

        async def one(number: int) -> generation_pb2.Started:
            options = Options(
                n=1 + number % 3,
                sampling=common_pb2.SamplingParams(seed=number),
                stopping=common_pb2.StopConditions(max_tokens=TOKENS, ignore_eos=True),
                output=generation_pb2.OutputOptions(logprobs=2 if number % 4 == 0 else None),
            )
            return (await gateway.open(first + number, text=f"prompt {number}", options=options)).started

        return dict(enumerate(await asyncio.gather(*map(one, range(STREAMS)))))

    async def answers(self, gateway: Gateway, first: int = 0) -> dict[int, Stream]:
        """All of them, whole."""
        return {number: await gateway.completed(first + number) for number in range(STREAMS)}

    async def until_tokens(self, count: int) -> None:
        """Until the victim has sent so many of the first stream's first choice."""
        streams = self.gateway.streams
        await self.gateway.until(lambda: 0 in streams and len(streams[0].ids.get(0, ())) >= count, 20)

    async def one(self, request_id: str = "x", tokens: int = 4000, **options: Any) -> generation_pb2.Started:
        """One long request at the victim, with some of its text read, on stream 0."""
        stopping = common_pb2.StopConditions(max_tokens=tokens, ignore_eos=True)
        sent = await self.gateway.open(0, request_id=request_id, options=Options(stopping=stopping, **options))
        await self.until_tokens(20)
        return sent.started

    async def until_idle(self) -> None:
        """Until nobody who lives remembers anything."""
        await until(lambda: not self.core.attempts and not any(c.app.open_requests() for c in self.claimers))


@asynccontextmanager
async def running(
    model: Path, *victim_flags: str, claimers: int = 1, lease_grace_s: float = 60.0
) -> AsyncIterator[System]:
    """All of them, ready."""
    async with AsyncExitStack() as stack:
        engine = SchedulerConfig(
            model=model, engine="fake", fake_first_id=34, fake_end_id=90, fake_pace_ms=5.0, kv_tokens=65536,
            lease_grace_s=lease_grace_s, **FREE,
        )  # fmt: skip
        scheduler, runtime, scheduler_at = await stack.enter_async_context(
            _process("scheduler", engine, lambda runtime: SchedulerApp(runtime, engine))
        )
        await _ready(runtime)
        detokenizing = DetokenizerConfig(model=model, schedulers=(scheduler_at,), **FREE)
        _, _, detokenizer_at = await stack.enter_async_context(
            _process("detokenizer", detokenizing, lambda runtime: DetokenizerApp(runtime, detokenizing))
        )
        flags = ("--model", str(model), "--schedulers", scheduler_at, "--detokenizers", detokenizer_at)
        victim = Killable(
            "services.tokenizer", (*flags, "--name", "victim", *victim_flags), admin_port=free_ports(1)[0]
        )
        stack.push_async_callback(victim.kill)
        await victim.start()
        made = [
            await _claimer(stack, Config(
                model=model, name=f"claimer-{number}", schedulers=(scheduler_at,), detokenizers=(detokenizer_at,),
                **FREE,
            ))
            for number in range(claimers)
        ]  # fmt: skip
        await victim.wait_ready()
        gateway, generation = await _reader(stack, victim.address)
        yield System(scheduler, victim, gateway, generation, made)


async def _claimer(stack: AsyncExitStack, config: Config) -> Claimer:
    app, runtime, address = await stack.enter_async_context(
        _process("tokenizer", config, lambda runtime: TokenizerApp(runtime, config))
    )
    await _ready(runtime)
    return Claimer(app, runtime, *await _reader(stack, address))


async def _reader(
    stack: AsyncExitStack, address: str
) -> tuple[Gateway, generation_pb2_grpc.GenerationServiceAsyncStub]:
    channel: Any = await stack.enter_async_context(connect(address))
    gateway = Gateway(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
    await gateway.connect()
    stack.push_async_callback(gateway.disconnect)
    return gateway, generation_pb2_grpc.GenerationServiceStub(channel)


async def until(condition: Callable[[], object], timeout_s: float = 20.0) -> None:
    """Waits until a condition holds that no event tells of."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def refusal(call: Any) -> TailraceError:
    """What the call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def take_over(system: System, claimer: Claimer, started: dict[int, generation_pb2.Started]) -> None:
    """Attaches all streams elsewhere, where their gateway stands."""
    attached = await asyncio.gather(
        *(claimer.gateway.attach(number, started[number], system.gateway.streams.get(number)) for number in started)
    )
    for number, response in enumerate(attached):
        assert response.started == started[number]
        assert (response.n, response.delivery) == (1 + number % 3, generation_pb2.DELIVERY_STREAM)


async def test_a_killed_tokenizers_streams_go_on_through_another_one_byte_for_byte(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        claimer = system.claimers[0]
        await system.open(claimer.gateway, 1000)
        undisturbed = await system.answers(claimer.gateway, 1000)
        await claimer.gateway.release(*range(1000, 1000 + STREAMS))
        started = await system.open(system.gateway)
        await system.until_tokens(60)
        await system.victim.kill()
        await take_over(system, claimer, started)
        check_same(undisturbed, await system.answers(claimer.gateway))
        assert claimer.metric("claimed_total") == STREAMS
        assert claimer.metric("integrity_errors_total") == 0
        await claimer.gateway.release(*started)
        await system.until_idle()


async def test_a_stopped_tokenizer_that_wakes_up_after_a_claim_lets_go_and_changes_nothing(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        claimer = system.claimers[0]
        await system.open(claimer.gateway, 1000)
        undisturbed = await system.answers(claimer.gateway, 1000)
        await claimer.gateway.release(*range(1000, 1000 + STREAMS))
        started = await system.open(system.gateway)
        await system.until_tokens(30)
        system.victim.send(signal.SIGSTOP)
        await take_over(system, claimer, started)
        system.victim.send(signal.SIGCONT)
        await system.gateway.until(lambda: len(system.gateway.cuts) == STREAMS)
        assert set(system.gateway.cuts.values()) == {1}  # CUT_REASON_CLAIMED
        assert not any(stream.finishes or stream.completed for stream in system.gateway.streams.values())
        # What its gateway says late, and what it would release then, concerns nobody.
        await system.gateway.release(*started, delivered=False)
        check_same(undisturbed, await system.answers(claimer.gateway))
        await claimer.gateway.release(*started)
        await system.until_idle()
        assert await held_by(system.victim) == 0


async def held_by(tokenizer: Killable) -> int:
    """Requests in its ledger."""
    async with connect(tokenizer.admin_address) as channel:
        stub = admin_pb2_grpc.InspectionServiceStub(channel)
        total: int = (await stub.ListRequests(admin_pb2.ListRequestsRequest(page_size=1), timeout=5)).total
        return total


async def test_a_drained_tokenizer_leaves_its_streams_to_another_one(tiny_model: Path) -> None:
    async with running(tiny_model, "--drain-timeout-s", "0.2") as system:
        claimer = system.claimers[0]
        await system.open(claimer.gateway, 1000)
        undisturbed = await system.answers(claimer.gateway, 1000)
        await claimer.gateway.release(*range(1000, 1000 + STREAMS))
        started = await system.open(system.gateway)
        await system.until_tokens(30)
        system.victim.send(signal.SIGTERM)
        await system.gateway.until(lambda: len(system.gateway.cuts) == STREAMS)
        assert set(system.gateway.cuts.values()) == {2}  # CUT_REASON_LEFT
        await take_over(system, claimer, started)
        check_same(undisturbed, await system.answers(claimer.gateway))
        await claimer.gateway.release(*started)
        await system.until_idle()


async def test_what_is_unknown_and_a_wrong_token_and_another_tenant_are_one_refusal_and_claim_nothing(
    tiny_model: Path,
) -> None:
    async with running(tiny_model) as system:
        gateway = system.claimers[0].gateway
        started = await system.one()
        unknown = generation_pb2.Started(request_id="y", resume_token=started.resume_token)
        errors = [
            await refusal(gateway.attach(1, unknown)),
            await refusal(gateway.attach(1, started, tenant="somebody else")),
            await refusal(gateway.attach(1, started, resume_token=b"0" * 16)),
            await refusal(gateway.attach(1, started, only_here=True)),
        ]
        assert {type(error) for error in errors} == {NotFound}
        assert {error.message.replace("'y'", "'x'") for error in errors} == {
            "request 'x' with this resume token not found"
        }
        assert {attempt.owner.tokenizer for attempt in system.core.attempts.values()} == {"victim"}


async def test_offsets_beyond_what_the_scheduler_holds_are_refused_at_once(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        started = await system.one()
        await system.victim.kill()
        ahead = Stream({0: [40] * 3999}, {0: "a" * 3999})
        error = await refusal(system.claimers[0].gateway.attach(1, started, ahead))
        assert isinstance(error, InvalidRequest)
        assert error.field == "offsets"
        # It waits here for the caller for whom it was claimed, and goes on.
        await system.claimers[0].gateway.attach(2, started, system.gateway.streams[0])
        await system.claimers[0].gateway.release(2, delivered=False)
        await system.until_idle()


async def test_of_two_who_claim_at_once_one_has_it_and_the_other_lets_go(tiny_model: Path) -> None:
    async with running(tiny_model, claimers=2) as system:
        started = await system.one(tokens=300)
        await system.victim.kill()
        has = system.gateway.streams[0]
        await asyncio.gather(
            *(claimer.gateway.attach(1, started, has) for claimer in system.claimers), return_exceptions=True
        )
        await until(lambda: any(claimer.gateway.cuts for claimer in system.claimers) or _refused(system))
        owner = next(iter(system.core.attempts.values())).owner.tokenizer
        winner, loser = system.claimers if owner == "claimer-0" else reversed(system.claimers)
        whole = await winner.gateway.completed(1)
        assert [len(ids) for ids in whole.ids.values()] == [300]
        assert not winner.gateway.cuts
        assert 1 not in loser.gateway.streams or loser.gateway.streams[1].completed is None
        assert system.core.find("", "x", 0.0).fence in (2, 3)  # 3: its look came after the other's claim
        await winner.gateway.release(1)
        await system.until_idle()


def _refused(system: System) -> bool:
    """Whether one of the claimers had lost it again before it could say so."""
    return any(not claimer.app.open_requests() for claimer in system.claimers)


async def test_a_direct_caller_resumes_at_another_tokenizer(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        stopping = common_pb2.StopConditions(max_tokens=200, ignore_eos=True)
        call: Any = system.generation.Generate(
            generation_pb2.GenerateRequest(text="abc", options=Options(stopping=stopping))
        )
        started = (await call.read()).started
        first = (await call.read()).delta
        await system.victim.kill()
        offset = generation_pb2.ChoiceOffset(token_offset=first.next_token_offset, text_offset=first.next_text_offset)
        request = generation_pb2.ResumeRequest(
            request_id=started.request_id, resume_token=started.resume_token, offsets=[offset]
        )
        events = [event async for event in system.claimers[0].generation.Resume(request)]
        ids = [*first.token_ids, *(one for event in events for one in event.delta.token_ids)]
        assert events[0].started == started
        assert len(ids) == 200
        assert events[-1].HasField("completed")
        await system.until_idle()


async def test_an_equal_request_after_the_death_is_the_same_run_and_before_it_one_of_another_tokenizer(
    tiny_model: Path,
) -> None:
    async with running(tiny_model) as system:
        gateway = system.claimers[0].gateway
        started = await system.one(tokens=300)
        options = Options(stopping=common_pb2.StopConditions(max_tokens=300, ignore_eos=True))
        asked = generation_pb2.GenerateRequest(request_id="x", text="abc", options=options)
        elsewhere: Any = system.claimers[0].generation.Generate(asked)
        assert isinstance(await refusal(elsewhere.read()), AlreadyExists)
        await system.victim.kill()
        await until(lambda: not system.core.find("", "x", 0.0).owner_present)
        assert isinstance(await refusal(gateway.open(1, request_id="x", options=Options(n=2))), AlreadyExists)
        again = (await gateway.open(1, request_id="x", options=options)).started
        assert again == started
        await gateway.completed(1)
        assert len(system.core.attempts) == 1
        await gateway.release(1)
        await system.until_idle()


async def test_an_equal_request_of_a_gateway_is_claimed_from_a_tokenizer_that_it_can_not_ask(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        started = await system.one(tokens=300)
        options = Options(stopping=common_pb2.StopConditions(max_tokens=300, ignore_eos=True))
        system.victim.send(signal.SIGSTOP)
        again = await system.claimers[0].gateway.open(1, request_id="x", options=options)
        assert again.started == started
        assert len((await system.claimers[0].gateway.completed(1)).ids[0]) == 300
        fresh = await system.claimers[0].gateway.open(2, request_id="x", fresh_id=True, options=options)
        assert fresh.started != started
        await system.claimers[0].gateway.release(1, 2, delivered=False)
        system.victim.send(signal.SIGCONT)
        await system.gateway.until(lambda: system.gateway.cuts)
        await system.until_idle()


async def test_an_abort_finds_a_request_whose_tokenizer_is_dead(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        generation = system.claimers[0].generation
        await system.one()
        await system.victim.kill()
        await until(lambda: not system.core.find("", "x", 0.0).owner_present)
        unknown = await generation.Abort(generation_pb2.AbortRequest(request_id="y"))
        assert unknown.outcome == generation_pb2.ABORT_OUTCOME_NOT_FOUND
        abort = generation_pb2.AbortRequest(request_id="x", wait_until_released=True)
        assert (await generation.Abort(abort)).outcome == generation_pb2.ABORT_OUTCOME_ABORTING
        assert not system.core.attempts
        await system.until_idle()


async def test_an_abort_at_another_tokenizer_ends_the_callers_stream_where_it_is(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        await system.one()
        abort = generation_pb2.AbortRequest(request_id="x")
        outcome = (await system.claimers[0].generation.Abort(abort)).outcome
        assert outcome == generation_pb2.ABORT_OUTCOME_ABORTING
        stream = await system.gateway.completed(0)
        assert stream.finishes[0].reason == common_pb2.FINISH_REASON_ABORTED
        await system.gateway.release(0)
        await system.until_idle()


async def test_what_nobody_claims_is_released_when_the_lease_is_over(tiny_model: Path) -> None:
    async with running(tiny_model, lease_grace_s=0.5) as system:
        await system.one()
        await system.victim.kill()
        await system.until_idle()
