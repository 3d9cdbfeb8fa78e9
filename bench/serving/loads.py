"""The loads that a server is put under: what is asked, and when."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.serving.prompts import Prompts


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: its text, how many tokens it wants (end-of-text is ignored), and a JSON schema that they obey."""

    prompt: str
    max_tokens: int
    schema: str | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """Requests, and when they are sent.

    `streams`: so many are open at any time, and the next is sent when one ends (closed loop). `per_s`: they come at
    random moments (Poisson), so many a second, whether or not others have ended (open loop). One of the two is 0.
    """

    name: str
    asks: Sequence[Ask]
    streams: int = 0
    per_s: float = 0.0


Maker = Callable[[Prompts, random.Random], Load]

SCHEMA = (
    '{"type":"object","properties":{"name":{"type":"string","maxLength":20},"age":{"type":"integer"},'
    '"tags":{"type":"array","items":{"enum":["red","green","blue"]},"minItems":2,"maxItems":4}},'
    '"required":["name","age","tags"],"additionalProperties":false}'
)


def closed(
    streams: int, prompt_tokens: int, output_tokens: int, *, rounds: int = 1, name: str = "", prose: bool = False
) -> Maker:
    """`streams` at once, each asking `rounds` times. Prompts are words at random, or prose."""

    def make(prompts: Prompts, rng: random.Random) -> Load:
        text = prompts.prose if prose else prompts.text
        asks = [Ask(text(prompt_tokens), output_tokens) for _ in range(streams * rounds)]
        return Load(name or f"c{streams}", asks, streams=streams)

    return make


def shared_prefix(streams: int, prefix_tokens: int, own_tokens: int, output_tokens: int, *, rounds: int) -> Maker:
    """All begin with the same text, as requests with one system prompt do."""

    def make(prompts: Prompts, rng: random.Random) -> Load:
        prefix = prompts.text(prefix_tokens)
        asks = [Ask(f"{prefix}\n{prompts.text(own_tokens)}", output_tokens) for _ in range(streams * rounds)]
        return Load("shared-prefix", asks, streams=streams)

    return make


def structured(streams: int, prompt_tokens: int, output_tokens: int) -> Maker:
    """Every answer obeys a JSON schema."""

    def make(prompts: Prompts, rng: random.Random) -> Load:
        asks = [Ask(prompts.text(prompt_tokens), output_tokens, SCHEMA) for _ in range(streams)]
        return Load("structured", asks, streams=streams)

    return make


def chat(per_s: float, count: int) -> Maker:
    """Lengths as conversations have them, mostly short and now and then long, at random moments."""

    def make(prompts: Prompts, rng: random.Random) -> Load:
        def length(median: int, most: int) -> int:
            return max(8, min(most, round(rng.lognormvariate(0, 0.8) * median)))

        asks = [Ask(prompts.text(length(120, 1500)), length(100, 400)) for _ in range(count)]
        return Load(f"chat-{per_s:g}/s", asks, per_s=per_s)

    return make


def long_among_short(streams: int) -> Maker:
    """Long prompts arriving among streams that decode: who disturbs whom shows in the inter-token latency."""

    def make(prompts: Prompts, rng: random.Random) -> Load:
        asks = [Ask(prompts.text(2048 if k % 8 == 7 else 64), 16 if k % 8 == 7 else 128) for k in range(streams * 2)]
        return Load("long-among-short", asks, streams=streams)

    return make


LOADS: dict[str, Maker] = {
    "c1": closed(1, 128, 128, rounds=2),
    "c8": closed(8, 128, 128),
    "c32": closed(32, 128, 128),
    "prefill1024": closed(1, 1024, 1, rounds=3, name="prefill1024"),
    "c1-prose": closed(1, 128, 128, rounds=2, name="c1-prose", prose=True),
    "c8-prose": closed(8, 128, 128, name="c8-prose", prose=True),
    "shared-prefix": shared_prefix(8, 512, 32, 32, rounds=3),
    "structured": structured(8, 64, 96),
    "chat": chat(1.0, 30),
    "long": long_among_short(8),
}
"""By name. The first four are those of the comparison with other servers."""
