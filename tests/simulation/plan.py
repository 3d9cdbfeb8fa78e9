"""From a seed to a plan: which processes there are, who asks what, and what goes wrong when.

A plan is plain and complete, so it can be printed, written by hand for a story, and have parts left out to find the
few that a failure needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from services.text.vocabulary import Vocabulary
from tests.simulation.model import eos_id, vocabulary
from tests.simulation.request import Behaviour, Request

TROUBLE_S = (0.5, 5.0)
"""Between these moments things go wrong; afterwards everything is mended."""

KINDS = (
    *("kill",) * 5, *("pause",) * 4, *("cut",) * 3, *("unary trouble",) * 3, *("block",) * 2, *("late calls",) * 2,
    *("stream trouble",) * 2, "drain", "kill silently", "slow down",
)  # fmt: skip

NEIGHBOURS = (
    *(("gateway", "tokenizer"),) * 2, ("tokenizer", "detokenizer"), ("tokenizer", "scheduler"),
    ("detokenizer", "scheduler"),
)  # fmt: skip

CALLS = (
    *(f"scheduler {method}" for method in ("Submit", "Abort", "Release", "Claim", "Reconcile")),
    *(f"tokenizer {method}" for method in ("Open", "Attach", "Release")),
)

STOPS = ("the", " quick", "\n", "ab", "🙂", " the quick", "世é", "own fox")


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The deployment: how many of each, and what they are like."""

    schedulers: int = 1
    detokenizers: int = 1
    tokenizers: int = 1
    gateways: int = 1
    echo: bool = False
    draft_tokens: int = 0
    step_s: float = 0.02
    window: int = 4
    kv_blocks: int = 64
    max_running: int = 8
    max_waiting: int = 16
    max_step_tokens: int = 48
    max_open: int = 64
    tombstone_ttl_s: float = 60.0  # longer than a Submit is tried, and the last one late

    @property
    def is_roomy(self) -> bool:
        """Whether a few plain requests at a time find room."""
        return self.max_running >= 8 and self.max_open >= 8

    def names(self, service: str) -> list[str]:
        """The processes of a service."""
        return [f"{service}-{number}" for number in range(1, getattr(self, f"{service}s") + 1)]

    @property
    def services(self) -> list[str]:
        """All processes."""
        kinds = ("scheduler", "detokenizer", "tokenizer", "gateway")
        return [name for kind in kinds for name in self.names(kind)]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that goes wrong.

    `kind`: "kill", "kill silently" (with its machine), "misfit" (restarted with another model), "pause", "drain",
    "slow down" a process; "cut" or "block"
    between two; "unary trouble", "stream trouble", "late calls" of one kind everywhere. `lasts_s`: until it is mended
    or started again.
    """

    at: float
    kind: str
    process: str = ""
    other: str = ""
    lasts_s: float = 0.0
    strength: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole run."""

    seed: int
    shape: Shape
    callers: Sequence[Behaviour] = ()
    faults: Sequence[Fault] = ()

    def without(self, parts: frozenset[int]) -> Plan:
        """The same without some of its parts: faults are counted first, then callers."""
        faults = [fault for number, fault in enumerate(self.faults) if number not in parts]
        first = len(self.faults)
        callers = [caller for number, caller in enumerate(self.callers, first) if number not in parts]
        return replace(self, faults=faults, callers=callers)


def by_chance(seed: int) -> Plan:
    """The plan of a seed, but for what chance alone doesn't bring about (occasions.py)."""
    random = Random(f"plan {seed}")
    shape = _shape(random)
    labels = [f"label-{number}" for number in range(random.randint(1, 4))]
    callers = [_behaviour(random, shape, labels) for _ in range(random.randint(3, 8))]
    if random.random() < 0.2:
        callers += [replace(random.choice(callers), at=random.uniform(0.6, 4.0)) for _ in range(2)]
    faults = [_fault(random, shape) for _ in range(random.choice((0, 1, 2, 2, 3, 3, 4, 6, 8)))]
    if random.random() < 0.3:
        rivals = _rivals(random, shape)
        callers += rivals
        if random.random() < 0.5:
            call = random.choice(("scheduler Abort", "scheduler Abort", "scheduler Release", "scheduler Submit"))
            at = max(rivals[0].at, TROUBLE_S[0])
            faults.append(Fault(at=at, kind="late calls", other=call, strength=0.8))
    return Plan(
        seed=seed,
        shape=replace(shape, draft_tokens=random.choice((0, 0, 2, 7))),
        callers=sorted(callers, key=lambda caller: caller.at),
        faults=sorted(faults, key=lambda fault: fault.at),
    )


def _shape(random: Random) -> Shape:
    tight = random.random() < 0.25
    return Shape(
        schedulers=random.choice((1, 1, 2, 3)),
        detokenizers=random.choice((1, 2)),
        tokenizers=random.choice((1, 2, 2)),
        gateways=random.choice((1, 1, 2)),
        echo=random.random() < 0.3,
        step_s=random.choice((0.01, 0.03, 0.08)),
        window=random.choice((1, 2, 4, 16)),
        kv_blocks=random.choice((11, 14, 24, 64)),
        max_running=random.choice((1, 2)) if tight else 8,
        max_waiting=random.choice((0, 1, 2)) if tight else 16,
        max_open=random.choice((2, 4)) if tight and random.random() < 0.5 else 64,
    )


def _behaviour(random: Random, shape: Shape, labels: Sequence[str]) -> Behaviour:
    request = _request(random, labels, shape.max_running + shape.max_waiting)
    doors = [*shape.names("gateway") * 2, *shape.names("tokenizer")]
    behaviour = Behaviour(at=random.uniform(0.3, 2.8), door=f"{random.choice(doors)}:7000", request=request)
    match random.choice(("reads", "reads", "reads", "slow", "stops", "leaves", "leaves", "aborts", "vanishes")):
        case "slow":
            return replace(behaviour, pause_s=random.uniform(0.01, 0.15))
        case "stops":
            return replace(behaviour, stops_reading_for=random.choice((1.0, 6.0)))
        case "leaves":
            back_after = random.choice((None, 0.0, 0.5, 2.0)) if request.detach or request.retain_s else None
            return replace(behaviour, leaves_after=_moment(random), back_after=back_after)
        case "aborts":
            waits = random.random() < 0.5
            return replace(behaviour, aborts_after=_moment(random), waits_until_released=waits)
        case "vanishes":
            return replace(behaviour, leaves_after=_moment(random), vanishes=True)
        case _:
            deadline_s = random.uniform(0.2, 4.0) if random.random() < 0.1 else None
            return replace(behaviour, deadline_s=deadline_s)


def _rivals(random: Random, shape: Shape) -> list[Behaviour]:
    """One aborts or leaves; at about that moment another asks under the same label."""
    first = replace(_behaviour(random, shape, ("rival",)), vanishes=False, stops_reading_for=0.0)
    request = replace(first.request, request_id="rival", max_tokens=random.choice((16, 60)))
    gone_after = random.uniform(0.0, 0.5)
    by_abort = random.random() < 0.7
    first = replace(
        first,
        request=request,
        leaves_after=None if by_abort else gone_after,
        aborts_after=gone_after if by_abort else None,
    )
    prompt_ids = request.prompt_ids if random.random() < 0.3 else _prompt(random, vocabulary())
    second = replace(
        first,
        at=first.at + gone_after + random.uniform(-0.01, 0.1),
        request=replace(request, prompt_ids=prompt_ids),
        leaves_after=None,
        aborts_after=None,
    )
    return [first, second]


def _moment(random: Random) -> float:
    """Often at the very beginning, where the races are."""
    return random.choice((0.0, random.uniform(0, 0.01), random.uniform(0, 0.2), random.uniform(0, 2.0)))


def _request(random: Random, labels: Sequence[str], max_n: int) -> Request:
    words, detach = vocabulary(), random.random() < 0.35
    stop = tuple({random.choice(STOPS) for _ in range(random.choice((0, 0, 1, 2)))})
    return Request(
        prompt_ids=_prompt(random, words),
        request_id=random.choice(labels) if random.random() < 0.35 else "",
        n=min(random.choice((1, 1, 1, 2, 3)), max_n),
        seed=random.getrandbits(32) if random.random() < 0.5 else None,
        max_tokens=random.choice((1, 4, 16, 40, 60, 90)),
        stop=tuple(sorted(stop)),
        stop_token_ids=tuple(random.randrange(256) for _ in range(random.choice((0, 0, 0, 8)))),
        include_stop=random.random() < 0.2,
        ignore_eos=random.random() < 0.5,
        logprobs=random.random() < 0.1,
        timeout_s=random.choice((0.3, 1.0, 3.0)) if random.random() < 0.15 else 0.0,
        whole=random.random() < 0.1,
        detach=detach,
        detach_ttl_s=random.choice((0.0, 1.0)) if detach else 0.0,
        retain_s=2.0 if random.random() < 0.15 else 0.0,
        never_fail_over=random.random() < 0.08,
    )


def _prompt(random: Random, words: Vocabulary) -> tuple[int, ...]:
    """Bytes of characters, words, and now and then a special token."""
    ids = _prompt_ids(words)
    return tuple(random.choice(ids) for _ in range(random.choice((1, 5, 20, 60))))


def prompt_of(random: Random, tokens: int) -> tuple[int, ...]:
    """The same, so long."""
    ids = _prompt_ids(vocabulary())
    return tuple(random.choice(ids) for _ in range(tokens))


def _prompt_ids(words: Vocabulary) -> list[int]:
    return [token_id for token_id in range(len(words.pieces) - 1) if token_id != eos_id()]


def _fault(random: Random, shape: Shape) -> Fault:
    at = random.uniform(*TROUBLE_S)
    process = random.choice(shape.services)
    lasts_s = random.choice((0.0, 0.3, 1.5, 4.0)) * (0.5 + random.random())
    kind = random.choice(KINDS)
    other, strength = "", 0.0
    match kind:
        case "cut" | "block":
            process, other = (random.choice(shape.names(service)) for service in random.choice(NEIGHBOURS))
        case "slow down":
            strength = random.choice((0.05, 0.5))
        case "unary trouble":
            process, strength, lasts_s = "", random.choice((0.2, 0.6)), 3.0
        case "late calls":
            process, other, strength = "", random.choice(CALLS), 0.8
        case "stream trouble":
            process, strength, lasts_s = "", random.choice((0.5, 3.0)), 3.0
        case "drain":
            lasts_s = 5.0
        case _:
            pass
    return Fault(at=at, kind=kind, process=process, other=other, lasts_s=lasts_s, strength=strength)
