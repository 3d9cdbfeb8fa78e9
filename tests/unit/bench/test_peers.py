"""A peer that can't run is told with its reason."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from bench.peers.peer import CantBeHad, Peer
from bench.peers.running import running_peer


class Dying(Peer):
    """A server that ends as soon as it starts."""

    name = "a peer"
    weights = "none"
    weight_bits = None
    model = "m"

    def __init__(self, code: str) -> None:
        self._code = code

    def install(self, root: Path, console: Console) -> None: ...

    def command(self, root: Path, port: int) -> Sequence[str]:
        return sys.executable, "-c", self._code


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGILL)", "SIGILL ended it"),
        ("raise SystemExit(3)", "it ended with code 3"),
    ],
)
async def test_a_peer_that_does_not_start_says_what_ended_it_and_where_it_logs(
    tmp_path: Path, code: str, reason: str
) -> None:
    with pytest.raises(CantBeHad, match=f"a peer does not start: {reason}; it logs to .*a-peer.log"):
        async with running_peer(Dying(code), tmp_path):
            pass
