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


OCCASIONS: tuple[Callable[[Random, Plan], Plan], ...] = (another_model, crowd, claim_in_vain, awakening)


def _caller(random: Random, *, at: float, prompt: int, max_tokens: int, timeout_s: float = 0.0) -> Behaviour:
    request = Request(prompt_ids=prompt_of(random, prompt), max_tokens=max_tokens, ignore_eos=True, timeout_s=timeout_s)
    return Behaviour(at=at, door="gateway-1:7000", request=request)
