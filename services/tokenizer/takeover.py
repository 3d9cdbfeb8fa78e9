"""Looking for requests that are not known here, and taking them over: the shell around claims.py.

Everything is decided before anything is claimed, from what the schedulers say they hold: a wrong token, other content,
or an answer of which a part is lost leave the request with whoever has it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from hmac import compare_digest

from services.protocol.answer import Offsets
from services.protocol.events import AbortOutcome, FinishReason
from services.protocol.request import ValidRequest
from services.protocol.sender import Wakeup
from services.runtime.clock import Clock
from services.runtime.error_tree import AlreadyExists, InvalidRequest, NotFound, TailraceError, Unavailable
from services.tokenizer.backoff import Backoff
from services.tokenizer.claims import Held, Remains, remains_of
from services.tokenizer.core import Ledger
from services.tokenizer.effects import Effects
from services.tokenizer.entry import Entry
from services.tokenizer.upstream import CALL_TIMEOUT_S, SchedulerLink

REBUILD_S = 5.0
"""How long a caller who comes back waits until what it has is rebuilt here; then it may ask again."""

DUPLICATE_LOOK_S = 0.5
"""How long a new request waits to hear whether its id is known elsewhere; a scheduler that is silent has no say."""


class TakeOver:
    """Requests of other tokenizers, as the schedulers know them. `until_accepted` waits for a claim's end."""

    def __init__(
        self,
        ledger: Ledger,
        links: Mapping[str, SchedulerLink],
        clock: Clock,
        *,
        perform: Callable[[Effects], None],
        until_accepted: Callable[[Entry], Awaitable[None]],
    ) -> None:
        self._ledger = ledger
        self._links = links
        self._clock = clock
        self._perform = perform
        self._until_accepted = until_accepted

    async def by_token(self, tenant: str, request_id: str, resume_token: bytes) -> Entry:
        """The request that another tokenizer had and this token belongs to, claimed.

        Raises NotFound, the same for an unknown id and a wrong token; Unavailable when it can't be told now.
        """
        what = f"request {request_id!r} with this resume token"
        found = await self._look(tenant, request_id)
        mine = [one for one in found if compare_digest(one.record.started.resume_token, resume_token)]
        if not mine:
            raise NotFound(what)
        try:
            return await self._take(tenant, mine[0])
        except NotFound:
            raise NotFound(what) from None

    async def same(self, tenant: str, request: ValidRequest, *, from_present: bool) -> Entry | None:
        """A request with this id that another tokenizer has or left behind, claimed, if it has the same content.

        A gateway asks here only when it can't ask there, so it is claimed `from_present` owners too. Raises
        AlreadyExists for other content, and for one whose owner is there otherwise: two direct callers would take it
        from each other again and again. None also for one that was aborted: its label is free.
        """
        try:
            found = await self._look(tenant, request.request_id, DUPLICATE_LOOK_S)
        except Unavailable:
            return None
        # Of what is ours, our own ledger has told that it isn't live: it was aborted, and is on its way out.
        found = [one for one in found if not self._is_ours(one)]
        if not found or not found[0].whole:
            return None
        if found[0].record.pinned.asked != request:
            raise AlreadyExists(f"request {request.request_id!r} with other content")
        if found[0].owner_present and not from_present:
            raise AlreadyExists(f"request {request.request_id!r} (at another tokenizer)")
        try:
            entry = await self._take(tenant, found[0])
        except NotFound:
            return None
        if found[0].ended and await self._was_aborted(entry):
            self._perform(self._ledger.drop(entry, self._clock.now()))
            return None
        return entry

    async def abort(self, tenant: str, request_id: str, *, wait_until_released: bool) -> AbortOutcome:
        """Stops a request that is not known here. Its tokenizer, or whoever claims it, tells its caller.

        Raises Unavailable when it can't be told now whether there is one.
        """
        found = await self._look(tenant, request_id)
        if not found:
            return AbortOutcome.NOT_FOUND
        remains = found[0]
        for held in remains.helds:
            await self._links[held.scheduler].abort_of_another([attempt.attempt_id for attempt in held.attempts])
        if wait_until_released:
            if not remains.owner_present:
                await self._release(tenant, remains)
            await self._until_nothing_is_held(tenant, request_id)
        return AbortOutcome.ALREADY_FINISHED if remains.ended else AbortOutcome.ABORTING

    async def rebuilt(self, entry: Entry, offsets: Offsets) -> None:
        """Returns once the answer has what its caller has.

        Raises InvalidRequest at once for what it can't come to have, NotFound when what was held is lost meanwhile,
        Unavailable when it takes too long.
        """
        for choice, (token_offset, _) in offsets.items():
            if entry.held and token_offset > max(entry.held[choice], len(entry.log.choices[choice].token_ids)):
                raise InvalidRequest("offsets", f"token {token_offset} is beyond what there is")
        if not entry.held or _has(entry, offsets):
            return
        await self._until(entry, lambda: _has(entry, offsets))
        if entry.caller_is_final:
            raise NotFound(f"request {entry.request_id!r} with this resume token")

    async def _was_aborted(self, entry: Entry) -> bool:
        """Of a whole answer: whether its caller had it stopped. It has no label any more; the next one asks anew."""
        await self._until(entry, lambda: False)
        finishes = (log.finish for log in entry.log.choices)
        return any(finish is not None and finish.reason is FinishReason.ABORTED for finish in finishes)

    async def _until(self, entry: Entry, enough: Callable[[], bool]) -> None:
        """Returns once enough of it is rebuilt, or nothing more will come. Raises Unavailable."""
        waiting = _Waiting()
        entry.readers.append(waiting)
        try:
            async with asyncio.timeout(REBUILD_S):
                while not (enough() or entry.caller_is_final or entry.completed):
                    await waiting.news.wait()
        except TimeoutError:
            raise Unavailable(f"request {entry.request_id!r} is still being rebuilt here") from None
        finally:
            entry.drop(waiting)

    async def _look(self, tenant: str, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> list[Remains]:
        """Asks all schedulers. Raises Unavailable when one that may have it does not answer, and no other has."""
        asked = [link.find(tenant, request_id, timeout_s) for link in self._links.values()]
        helds: list[Held] = []
        silent: TailraceError | None = None
        for answer in await asyncio.gather(*asked, return_exceptions=True):
            if isinstance(answer, TailraceError):
                silent = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                helds.append(answer)
        found = remains_of(helds)
        if silent is not None and not any(remains.whole for remains in found):
            raise silent
        return found

    def _is_ours(self, remains: Remains) -> bool:
        ids = (attempt.attempt_id for held in remains.helds for attempt in held.attempts)
        return any(self._ledger.attempts.get(attempt_id) is not None for attempt_id in ids)

    async def _take(self, tenant: str, remains: Remains) -> Entry:
        """Enters and claims it, unless somebody else did so meanwhile; returns once it is ours."""
        known = self._ledger.live(tenant, remains.record.started.request_id)
        if known is None:
            for held in remains.helds:
                link = self._links[held.scheduler]
                if not link.live:
                    raise Unavailable(f"scheduler {held.scheduler} has it: {link.why_not}", reason="NO_ROUTE")
            known, effects = self._ledger.claims.take_over(tenant, remains, self._clock.now())
            self._perform(effects)
        elif known.started != remains.record.started:
            raise NotFound(f"request {known.request_id!r}")
        await self._until_accepted(known)
        return known

    async def _release(self, tenant: str, remains: Remains) -> None:
        """Nobody else will before its lease is over: its tokenizer is gone."""
        try:
            entry = await self._take(tenant, remains)
        except TailraceError:
            return  # somebody has it again, or nobody any more
        self._perform(self._ledger.drop(entry, self._clock.now()))

    async def _until_nothing_is_held(self, tenant: str, request_id: str) -> None:
        backoff = Backoff(0.02, 1.0)
        while await self._look(tenant, request_id):  # noqa: ASYNC110  # another process has no event for us
            await asyncio.sleep(backoff.next())


class _Waiting:
    """Reads nothing, and is told of news."""

    def __init__(self) -> None:
        self.news = Wakeup()

    def mark(self) -> None:
        """The answer has something new."""
        self.news.set()

    def token_offset(self, choice: int) -> int:
        """Of nothing."""
        return 0


def _has(entry: Entry, offsets: Offsets) -> bool:
    logs = entry.log.choices
    return all(len(logs[choice].token_ids) >= token_offset for choice, (token_offset, _) in offsets.items())
