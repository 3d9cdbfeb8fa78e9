"""Courses of things that chance alone hardly ever brings together, so that every way through the tables is gone.

Each takes a plan of chance's place, or comes on top of it: callers, faults and what the deployment must be like for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from tests.simulation.plan import Fault, Plan, Shape, by_chance, prompt_of
from tests.simulation.request import Behaviour, Request

LIKELIHOOD = 0.1
"""Of an occasion in a plan."""


def plan_of(seed: int) -> Plan:
    """The plan of a seed: by chance, and now and then with an occasion."""
    random, plan = Random(f"occasion {seed}"), by_chance(seed)
    if random.random() >= LIKELIHOOD:
        return plan
    met = random.choice(OCCASIONS)(random, plan)
    return replace(
        met,
        callers=sorted(met.callers, key=lambda caller: caller.at),
        faults=sorted(met.faults, key=lambda fault: fault.at),
    )


def another_model(random: Random, plan: Plan) -> Plan:
    """A tokenizer is restarted with another vocabulary, beside one that fits: gateways must not use it."""
    fault = Fault(
        at=random.uniform(0.5, 2.5),
        kind="misfit",
        process=f"tokenizer-{random.choice((1, 2))}",
        lasts_s=random.uniform(0.5, 2.0),
    )
    return replace(plan, shape=replace(plan.shape, tokenizers=2), faults=[*plan.faults, fault])


def crowd(random: Random, plan: Plan) -> Plan:
    """Answers that grow into the last blocks while a long prompt is still computed, in many small chunks.

    One block per sequence is left free for that; so they must need a second one each before the prompt is done. With no
    call late, tombstones may go early.
    """
    shape = Shape(
        kv_blocks=random.randint(31, 35), max_step_tokens=16, step_s=random.choice((0.01, 0.03)), tombstone_ttl_s=0.3
    )
    callers = [_caller(random, at=0.5, prompt=random.randint(3, 8), max_tokens=90) for _ in range(7)]
    callers += [_caller(random, at=random.uniform(0.52, 0.6), prompt=250, max_tokens=4) for _ in range(2)]
    return replace(plan, shape=shape, callers=callers, faults=[])


def claim_in_vain(random: Random, plan: Plan) -> Plan:
    """A tokenizer dies with requests that are nearly out of time, and Claims of them hardly get through."""
    shape = Shape(tokenizers=2, step_s=0.08)
    at = random.uniform(0.5, 2.0)
    callers = [_caller(random, at=at, prompt=5, max_tokens=90, timeout_s=random.uniform(0.8, 1.5)) for _ in range(4)]
    faults = [
        Fault(at=0.5, kind="late calls", other="scheduler Claim", strength=0.95),
        Fault(at=at + 0.4, kind="kill", process=f"tokenizer-{random.choice((1, 2))}", lasts_s=4.0),
    ]
    return replace(plan, shape=shape, callers=callers, faults=faults)


def awakening(random: Random, plan: Plan) -> Plan:
    """A tokenizer wakes up just while another one is being asked to go on with its streams."""
    shape = Shape(tokenizers=2, schedulers=random.choice((1, 2)), step_s=0.08)
    sleeper, other = random.sample(("tokenizer-1", "tokenizer-2"), 2)
    at = random.uniform(0.8, 1.5)
    callers = [_caller(random, at=at - 0.4, prompt=5, max_tokens=90) for _ in range(4)]
    faults = [
        Fault(at=at, kind="pause", process=sleeper, lasts_s=random.uniform(1.8, 2.6)),
        Fault(at=at + 1.5, kind="slow down", process=other, strength=0.5, lasts_s=1.5),
    ]
    return replace(plan, shape=shape, callers=callers, faults=faults)


def claim_of_the_dead(random: Random, plan: Plan) -> Plan:
    """A tokenizer dies, and what it left is being claimed at a scheduler that dies before it has answered."""
    shape = Shape(tokenizers=2, schedulers=random.choice((1, 2)), step_s=0.08)
    at = random.uniform(0.8, 1.5)
    callers = [_caller(random, at=at - 0.4, prompt=5, max_tokens=90) for _ in range(4)]
    faults = [
        Fault(at=0.5, kind="late calls", other="scheduler Claim", strength=0.95),
        Fault(at=at, kind="kill", process=f"tokenizer-{random.choice((1, 2))}", lasts_s=3.0),
        Fault(at=at + random.uniform(0.05, 0.3), kind="kill", process="scheduler-1", lasts_s=random.choice((0.1, 1.0))),
    ]
    return replace(plan, shape=shape, callers=callers, faults=faults)


def rival_claimers(random: Random, plan: Plan) -> Plan:
    """What two schedulers hold is left by a tokenizer that two gateways share, one of which can't reach another one."""
    shape = Shape(tokenizers=3, gateways=2, schedulers=2, step_s=0.08)
    first = _caller(random, at=0.4, prompt=5, max_tokens=90)
    shared = replace(first.request, request_id="shared", seed=random.getrandbits(32), n=random.choice((1, 2)))
    callers = [
        replace(first, request=shared),
        replace(first, request=shared, at=0.45, door="gateway-2:7000"),
    ]
    dies, hidden = random.sample(("tokenizer-1", "tokenizer-2", "tokenizer-3"), 2)
    back_at = random.uniform(4.2, 4.4)
    faults = [
        Fault(at=back_at - 3.17, kind="pause", process=f"scheduler-{random.choice((1, 2))}", lasts_s=3.17),
        Fault(at=1.5, kind="block", process="gateway-2", other=hidden, lasts_s=3.4),
        Fault(at=back_at - 0.05, kind="late calls", other="scheduler Claim", strength=random.choice((0.0, 0.8))),
        Fault(at=back_at - 0.02, kind="kill", process=dies, lasts_s=0.6),
    ]
    return replace(plan, shape=shape, callers=callers, faults=faults)


def blink(random: Random, plan: Plan) -> Plan:
    """A tokenizer loses its only route and has it again while its messages to the gateway stand in line."""
    shape = Shape(window=1, step_s=0.01)
    at = random.uniform(1.0, 1.5)
    callers = [_caller(random, at=random.uniform(0.5, 1.5), prompt=5, max_tokens=90) for _ in range(6)]
    faults = [Fault(at=at, kind="slow down", process="gateway-1", strength=0.5, lasts_s=3.0)]
    pair = random.choice((("tokenizer-1", "detokenizer-1"), ("detokenizer-1", "scheduler-1")))
    faults += [Fault(at=at + 0.5 * n, kind="cut", process=pair[0], other=pair[1]) for n in range(1, 5)]
    return replace(plan, shape=shape, callers=callers, faults=faults)


OCCASIONS: tuple[Callable[[Random, Plan], Plan], ...] = (
    another_model, crowd, claim_in_vain, awakening, claim_of_the_dead, rival_claimers, blink,
)  # fmt: skip


def _caller(random: Random, *, at: float, prompt: int, max_tokens: int, timeout_s: float = 0.0) -> Behaviour:
    request = Request(prompt_ids=prompt_of(random, prompt), max_tokens=max_tokens, ignore_eos=True, timeout_s=timeout_s)
    return Behaviour(at=at, door="gateway-1:7000", request=request)
