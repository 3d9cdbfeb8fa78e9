"""Rules about the return path: for every pair of places where an answer stands, does what the one has reach the other.

A place is stuck when the one before it was ahead in both looks and it has not moved between them. Only the first stuck
link of a request counts: what comes after it can't move either.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cli.diagnosis.finding import Case, Finding, Severity, count, named
from cli.loop import Flow
from services.protocol.views import ChoiceView, RequestView


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens of one choice that have come so far, at one place on the way out."""

    where: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Link:
    """Two neighbouring places, in words."""

    code: str
    link: str
    what: str
    advice: str
    severity: Severity = Severity.STUCK


NETWORK = (
    "see whether both processes live and whether the network between them is whole; the stream is made again by itself."
)

LINKS = {
    ("generated", "sent"): Link(
        "NOT_SENT",
        "scheduler → detokenizer → tokenizer",
        "the scheduler has tokens that it can't send: nobody reads its route, or the reader takes nothing",
        "see the detokenizer and the tokenizer: one of them could not open the route again.",
    ),
    ("sent", "received"): Link(
        "NOT_RECEIVED",
        "scheduler → detokenizer",
        "the scheduler emits and the detokenizer does not receive",
        NETWORK,
    ),
    ("sent", "merged"): Link(
        "NOT_RECEIVED",
        "scheduler → detokenizer → tokenizer",
        "the scheduler emits and no detokenizer has the request: its route is gone",
        NETWORK,
    ),
    ("received", "detokenized"): Link(
        "HELD_BACK",
        "detokenizer",
        "the detokenizer received tokens and emits nothing",
        "",
        Severity.NOTE,
    ),
    ("detokenized", "merged"): Link(
        "TEXT_NOT_RECEIVED",
        "detokenizer → tokenizer",
        "the detokenizer emits text and the tokenizer does not receive it",
        NETWORK,
    ),
    ("merged", "told"): Link(
        "EVENTS_NOT_SENT",
        "tokenizer → gateway",
        "the tokenizer has output that it can't send: its gateway has no event stream, or takes nothing from it",
        "see the gateway: it hangs or is gone; after its grace these requests are ended.",
    ),
    ("told", "at the gateway"): Link(
        "EVENTS_NOT_RECEIVED",
        "tokenizer → gateway",
        "the tokenizer sends events and the gateway does not receive them",
        NETWORK,
    ),
    ("at the gateway", "taken by the caller"): Link(
        "CALLER_READS_NOT",
        "gateway → caller",
        "the caller does not read its stream",
        "nothing is wrong in here, but with the caller or its network; after slow_reader_timeout_s it is ended.",
    ),
    ("merged", "taken by the caller"): Link(
        "CALLER_READS_NOT",
        "tokenizer → caller",
        "a direct caller does not read its stream",
        "nothing is wrong in here, but with the caller or its network.",
    ),
}


def stuck_links(case: Case) -> Iterator[Finding]:
    """The first link of each request over which nothing comes, requests of one link together."""
    found: dict[str, list[Flow]] = {}
    for before, now in case.both():
        code = _first_stuck(before, now)
        if code is not None:
            found.setdefault(code, []).append(now)
    links = {link.code + link.link: link for link in LINKS.values()}
    for code, flows in found.items():
        yield _finding(links[code], flows)


def places(flow: Flow, choice: int) -> list[Place]:
    """Where a choice stands, from the engine outwards, as far as anybody knows."""
    found = [*_engine_places(flow, choice)]
    tokenizer = _choice(flow.tokenizer, choice)
    if tokenizer is None or flow.tokenizer is None:
        return found
    found.append(Place("merged", tokenizer.log_token_offset))
    if flow.tokenizer.whole and not tokenizer.finish_reason:
        return found
    return [*found, *_reader_places(flow, flow.tokenizer, choice)]


def _engine_places(flow: Flow, choice: int) -> Iterator[Place]:
    """Up to the detokenizer; nothing once the answer is whole, or the text was cut before the engine's end."""
    tokenizer = _choice(flow.tokenizer, choice)
    if tokenizer is not None and tokenizer.finish_reason:
        return
    scheduler, detokenizer = _choice(flow.scheduler, choice), _choice(flow.detokenizer, choice)
    cut = detokenizer is not None and detokenizer.phase not in ("", "OPEN")
    if scheduler is not None and not cut:
        yield Place("generated", scheduler.log_token_offset)
        yield Place("sent", scheduler.cursor_token_offset)
    if detokenizer is not None:
        if not cut:
            yield Place("received", detokenizer.log_token_offset)
        yield Place("detokenized", detokenizer.cursor_token_offset)


def _reader_places(flow: Flow, tokenizer: RequestView, choice: int) -> Iterator[Place]:
    gateway = _choice(flow.gateway, choice)
    for reader in tokenizer.readers:
        if reader.gateway_epoch == 0:
            yield Place("taken by the caller", reader.token_offsets[choice])
            return
        yield Place("told", reader.token_offsets[choice])
        if gateway is not None:
            yield Place("at the gateway", gateway.log_token_offset)
            yield Place("taken by the caller", gateway.cursor_token_offset)
        return


def _first_stuck(before: Flow, now: Flow) -> str | None:
    if now.tokenizer is None:
        return None
    for choice in now.tokenizer.choices:
        earlier, later = places(before, choice.choice), places(now, choice.choice)
        if [place.where for place in earlier] != [place.where for place in later]:
            continue
        for at in range(1, len(later)):
            ahead = earlier[at - 1].tokens > earlier[at].tokens and later[at - 1].tokens > later[at].tokens
            if ahead and earlier[at].tokens == later[at].tokens:
                link = LINKS.get((later[at - 1].where, later[at].where))
                if link is not None:
                    return link.code + link.link
    return _end_not_taken(before, now)


def _end_not_taken(before: Flow, now: Flow) -> str | None:
    """All is at the gateway, the end too, and the last write to the caller does not go through."""
    for flow in (before, now):
        gateway = flow.gateway
        if gateway is None or gateway.caller_phase != "ENDED" or gateway.waits_for != "CALLER":
            return None
    link = LINKS["at the gateway", "taken by the caller"]
    return link.code + link.link


def _finding(link: Link, flows: list[Flow]) -> Finding:
    if link.code == "HELD_BACK":
        return _held_back(link, flows)
    idle = [flow.gateway.idle_ms for flow in flows if flow.gateway is not None and link.code == "CALLER_READS_NOT"]
    idle = [ms for ms in idle if ms] or [flow.tokenizer.idle_ms for flow in flows if flow.tokenizer is not None]
    return Finding(
        code=link.code,
        severity=link.severity,
        link=link.link,
        since_ms=max(idle, default=None),
        what=f"{count(len(flows), 'request')}: {link.what}.",
        advice=link.advice,
        requests=named(flows),
    )


def _held_back(link: Link, flows: list[Flow]) -> Finding:
    choices = [choice for flow in flows if flow.detokenizer is not None for choice in flow.detokenizer.choices]
    stops = sum(choice.held_for_stop > 0 for choice in choices)
    incomplete = sum(choice.incomplete_character for choice in choices)
    why = [f"text that may begin a stop text ({stops})"] if stops else []
    why += [f"a character whose last bytes are still to come ({incomplete})"] if incomplete else []
    held = " and ".join(why) or "tokens without text"
    return Finding(
        code=link.code,
        severity=link.severity,
        link=link.link,
        since_ms=max((flow.tokenizer.idle_ms for flow in flows if flow.tokenizer is not None), default=None),
        what=f"{count(len(flows), 'request')}: {link.what}: it holds back {held}.",
        advice="this is right: what was sent is never taken back. The next tokens, or the end, let it out.",
        requests=named(flows),
    )


def _choice(view: RequestView | None, choice: int) -> ChoiceView | None:
    return None if view is None else next((c for c in view.choices if c.choice == choice), None)
