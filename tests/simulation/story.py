"""A plan written by hand: what happens when, line by line, and how everybody fares in the end.

    # Why this story is told.
    with 2 schedulers, steps of 20 ms
    0.50 alice asks gateway-1 for 40 tokens as "x"
    0.70 scheduler-1 is killed for 0.5 s
    in the end alice has LENGTH with 40 tokens

An ask may go on with `as "label"`, `of "prompt"`, `stopping at "text"`, `in 2 choices`, `within 0.2 s`, `detached`,
`without failover`, `reading every 0.5 s`, and `aborts after`, `leaves after`, `is back after` so many seconds.
Processes are killed, paused or drained `for` a while; two of them are cut, or cut off `for` a while. From a moment on
every call of a kind comes late, long after it was given up: `0.50 every Submit to a scheduler comes late`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tests.simulation.caller import Caller
from tests.simulation.model import ids_of
from tests.simulation.plan import Fault, Plan, Shape
from tests.simulation.request import Behaviour, Request

FOLDER = Path(__file__).parent / "stories"


class Unreadable(ValueError):
    """A line that the form above does not know."""


@dataclass(frozen=True)
class Ending:
    """How one caller is to fare: an outcome's kind, a code of a refusal or cut, or a finish reason with its tokens."""

    caller: str
    fate: str
    tokens: int | None = None

    def unlike(self, caller: Caller) -> str:
        """How it fared otherwise; empty when it did not."""
        assert caller.outcome is not None
        finishes = caller.answer.finishes
        fates = {caller.outcome.kind, caller.outcome.code, *(finish.reason.name for finish in finishes)}
        counts = [finish.output_tokens for finish in finishes]
        if self.fate not in fates or (self.tokens is not None and self.tokens not in counts):
            return f"{self} but {caller.outcome}, with {counts} tokens"
        return ""


@dataclass
class Story:
    """A plan and its endings."""

    shape: Shape = field(default_factory=Shape)
    callers: list[Behaviour] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    endings: list[Ending] = field(default_factory=list)

    def plan(self, seed: int) -> Plan:
        """With the small chances of a seed: latencies, steps, who is first."""
        return Plan(seed=seed, shape=self.shape, callers=self.callers, faults=self.faults)

    def wrongs(self, callers: Iterable[Caller]) -> list[str]:
        """Which of its endings were others."""
        fared = {caller.name: caller for caller in callers}
        return [why for ending in self.endings if (why := ending.unlike(fared[ending.caller]))]


def stories() -> Sequence[Path]:
    """All that are written."""
    return sorted(FOLDER.glob("*.txt"))


def read_story(text: str) -> Story:
    """Raises Unreadable, naming the line."""
    story = Story()
    for line in filter(None, (line.partition("#")[0].strip() for line in text.splitlines())):
        if not any(form(story, line) for form in (_with, _ask, _strike, _part, _late, _end)):
            raise Unreadable(line)
    return story


def _with(story: Story, line: str) -> bool:
    if not line.startswith("with "):
        return False
    for part in line.removeprefix("with ").split(", "):
        if found := re.fullmatch(r"(\d+) (scheduler|detokenizer|tokenizer|gateway)s", part):
            story.shape = replace(story.shape, **{f"{found[2]}s": int(found[1])})
        elif found := re.fullmatch(r"steps of (\d+) ms", part):
            story.shape = replace(story.shape, step_s=int(found[1]) / 1000)
        elif found := re.fullmatch(r"room for (\d+) running and (\d+) waiting", part):
            story.shape = replace(story.shape, max_running=int(found[1]), max_waiting=int(found[2]))
        elif found := re.fullmatch(r"room for (\d+) open", part):
            story.shape = replace(story.shape, max_open=int(found[1]))
        elif part == "an engine that repeats the prompt":
            story.shape = replace(story.shape, echo=True)
        else:
            raise Unreadable(part)
    return True


def _ask(story: Story, line: str) -> bool:
    found = re.match(r"([\d.]+) (\w+) asks ([\w-]+) for (\d+) tokens?\b", line)
    if not found:
        return False
    request = Request(prompt_ids=ids_of("Once upon a time"), max_tokens=int(found[4]), seed=1, ignore_eos=True)
    asking = Behaviour(name=found[2], at=float(found[1]), door=f"{found[3]}:7000", request=request)
    story.callers.append(_more_of(asking, line[found.end() :]))
    return True


def _more_of(asking: Behaviour, rest: str) -> Behaviour:
    while rest := rest.lstrip(" ,"):
        for form, change in _CLAUSES.items():
            if found := re.match(form, rest):
                asking, rest = change(asking, found[1] if found.lastindex else ""), rest[found.end() :]
                break
        else:
            raise Unreadable(rest)
    return asking


def _asking(**changes: object) -> Callable[[Behaviour], Behaviour]:
    return lambda asking: replace(asking, request=replace(asking.request, **changes))  # type: ignore[arg-type]  # as written


_CLAUSES: dict[str, Callable[[Behaviour, str], Behaviour]] = {
    r'as "([^"]+)"': lambda asking, label: _asking(request_id=label)(asking),
    r'of "([^"]+)"': lambda asking, text: _asking(prompt_ids=ids_of(text))(asking),
    r'stopping at "([^"]+)"': lambda asking, text: _asking(stop=(text,))(asking),
    r"in (\d+) choices": lambda asking, n: _asking(n=int(n))(asking),
    r"within ([\d.]+) s": lambda asking, seconds: _asking(timeout_s=float(seconds))(asking),
    r"without failover": lambda asking, _: _asking(never_fail_over=True)(asking),
    r"detached": lambda asking, _: _asking(detach=True)(asking),
    r"reading every ([\d.]+) s": lambda asking, seconds: replace(asking, pause_s=float(seconds)),
    r"aborts after ([\d.]+) s": lambda asking, seconds: replace(asking, aborts_after=float(seconds)),
    r"leaves after ([\d.]+) s": lambda asking, seconds: replace(asking, leaves_after=float(seconds)),
    r"is back after ([\d.]+) s": lambda asking, seconds: replace(asking, back_after=float(seconds)),
    r"and": lambda asking, _: asking,
}


def _strike(story: Story, line: str) -> bool:
    found = re.fullmatch(r"([\d.]+) ([\w-]+) is (killed|paused|drained) for ([\d.]+) s", line)
    if found:
        kind = {"killed": "kill", "paused": "pause", "drained": "drain"}[found[3]]
        story.faults.append(Fault(at=float(found[1]), kind=kind, process=found[2], lasts_s=float(found[4])))
    return bool(found)


def _part(story: Story, line: str) -> bool:
    found = re.fullmatch(r"([\d.]+) ([\w-]+) and ([\w-]+) are cut(?: off for ([\d.]+) s)?", line)
    if found:
        kind, lasts_s = ("block", float(found[4])) if found[4] else ("cut", 0.0)
        at, process, other = float(found[1]), found[2], found[3]
        story.faults.append(Fault(at=at, kind=kind, process=process, other=other, lasts_s=lasts_s))
    return bool(found)


def _late(story: Story, line: str) -> bool:
    found = re.fullmatch(r"([\d.]+) every (\w+) to an? (\w+) comes late", line)
    if found:
        call = f"{found[3]} {found[2]}"
        story.faults.append(Fault(at=float(found[1]), kind="late calls", other=call, strength=0.8))
    return bool(found)


def _end(story: Story, line: str) -> bool:
    found = re.fullmatch(r"in the end (\w+) (?:has|is|was) ([\w ]+?)(?: with (\d+) tokens?)?", line)
    if found:
        story.endings.append(Ending(found[1], found[2], int(found[3]) if found[3] else None))
    return bool(found)
