"""Which tokenizer a request goes to: of those that are ready, the one with the fewest of our streams.

A request that its caller has named goes where every gateway would send it, so that equal ones meet: the tokenizers are
put in an order that follows from its tenant and id alone, and the first that is ready gets it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from hashlib import blake2b

from gateway.upstream import TokenizerLink
from services.protocol.hello import Hello, mismatch
from services.runtime.errors import Unavailable


class Router:
    """The links to all tokenizers of the deployment."""

    def __init__(self, ours: Hello) -> None:
        self.links: Sequence[TokenizerLink] = ()  # set once: a link needs the router's `misfit` to be made
        self._ours = ours
        self._ready = asyncio.Event()

    @property
    def ready(self) -> bool:
        """Whether any tokenizer can take a request."""
        return any(link.ready for link in self.links)

    @property
    def why_not(self) -> str:
        """Why none can, in words; empty when one can."""
        return "" if self.ready else "; ".join(f"tokenizer {link.address}: {link.why}" for link in self.links)

    @property
    def lone(self) -> bool:
        """Whether there is but one, which may be asked for anything: what it has not itself, it may claim."""
        return len(self.links) == 1 and self.ready

    def changed(self) -> None:
        """A link has become ready, or is no longer."""
        if self.ready:
            self._ready.set()
        else:
            self._ready.clear()

    async def wait_ready(self) -> None:
        """Returns once a tokenizer can take requests."""
        await self._ready.wait()

    def by_load(self) -> list[TokenizerLink]:
        """All links, the one with the fewest streams first."""
        return sorted(self.links, key=lambda link: len(link.streams))

    def in_order(self, tenant: str, request_id: str) -> list[TokenizerLink]:
        """All links, in the order that is a named request's own."""
        name = f"{len(tenant)} {tenant} {request_id} "
        return sorted(self.links, key=lambda link: blake2b((name + link.address).encode()).digest())

    def pick(self) -> TokenizerLink:
        """Where what any tokenizer can answer goes. Raises Unavailable, naming why, when none is ready."""
        return self.first_ready(self.by_load())

    def first_ready(self, links: Iterable[TokenizerLink]) -> TokenizerLink:
        """The first of these that is ready. Raises Unavailable, naming why, when none is."""
        for link in links:
            if link.ready:
                return link
        raise self.none_ready()

    def none_ready(self) -> Unavailable:
        """The refusal when no tokenizer can take a request."""
        return Unavailable(f"no tokenizer is ready ({self.why_not})", reason="NO_TOKENIZER")

    def misfit(self, theirs: Hello) -> str | None:
        """Why a tokenizer must not be used by us, or beside those that are: one deployment serves one model."""
        if why := mismatch(self._ours, theirs):
            return why
        for link in self.links:
            if link.connected and link.peer is not None and (why := mismatch(link.peer, theirs)):
                return f"{why} (as tokenizer {link.address} has it)"
        return None
