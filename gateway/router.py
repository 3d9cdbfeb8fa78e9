"""Which tokenizer a request goes to: of those that are ready, the one with the fewest of our streams."""

from __future__ import annotations

from collections.abc import Sequence

from gateway.upstream import TokenizerLink
from services.protocol.hello import Hello, mismatch
from services.runtime.errors import Unavailable


class Router:
    """The links to all tokenizers of the deployment."""

    def __init__(self, ours: Hello) -> None:
        self.links: Sequence[TokenizerLink] = ()  # set once: a link needs the router's `misfit` to be made
        self._ours = ours

    @property
    def ready(self) -> bool:
        """Whether any tokenizer can take a request."""
        return any(link.ready for link in self.links)

    @property
    def why_not(self) -> str:
        """Why none can, in words; empty when one can."""
        return "" if self.ready else "; ".join(f"tokenizer {link.address}: {link.why}" for link in self.links)

    def pick(self) -> TokenizerLink:
        """Where the next request goes. Raises Unavailable, naming why, when no tokenizer is ready."""
        ready = [link for link in self.links if link.ready]
        if not ready:
            raise Unavailable(f"no tokenizer is ready ({self.why_not})", reason="NO_TOKENIZER")
        return min(ready, key=lambda link: len(link.streams))

    def misfit(self, theirs: Hello) -> str | None:
        """Why a tokenizer must not be used by us, or beside those that are: one deployment serves one model."""
        if why := mismatch(self._ours, theirs):
            return why
        for link in self.links:
            if link.connected and link.peer is not None and (why := mismatch(link.peer, theirs)):
                return f"{why} (as tokenizer {link.address} has it)"
        return None
