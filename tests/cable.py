"""A TCP connection between two processes that a test can cut, freeze, slow down, or hold up in one direction."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import psutil

PIECE_BYTES = 65_536
DROP_S = 0.05


@dataclass(eq=False)
class _Strand:
    """One connection: whose it is, and whether its bytes pass."""

    pid: int | None
    writers: list[asyncio.StreamWriter]
    requests_pass: asyncio.Event = field(default_factory=asyncio.Event)
    answers_pass: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.requests_pass.set()
        self.answers_pass.set()

    def freeze(self) -> None:
        self.requests_pass.clear()
        self.answers_pass.clear()


class Cable:
    """Listens at `address` and carries every connection to `target` (host:port). `pid`s name the callers' processes."""

    def __init__(self, address: str, target: str) -> None:
        self.address, self._target = address, target
        self._strands: set[_Strand] = set()
        self._cut = False
        self._bytes_per_s: int | None = None
        self._frozen: set[int | None] = set()

    def throttle(self, bytes_per_s: int) -> None:
        """Answers pass this slowly, until it is mended."""
        self._bytes_per_s = bytes_per_s

    def freeze(self, pid: int | None = None) -> None:
        """Nothing passes any more, on new connections neither, and nobody is told: of one caller, or of all."""
        self._frozen.add(pid)
        for strand in self._of(pid):
            strand.freeze()

    def hold_requests(self, pid: int) -> None:
        """What this caller sends waits; what it is sent passes."""
        for strand in self._of(pid):
            strand.requests_pass.clear()

    def cut(self) -> None:
        """Every connection is reset, and new ones are too."""
        self._cut = True
        self._reset()

    def mend(self) -> None:
        """As new: what was frozen is reset, so that both ends begin again."""
        self._cut, self._bytes_per_s = False, None
        self._frozen.clear()
        if any(not (s.requests_pass.is_set() and s.answers_pass.is_set()) for s in self._strands):
            self._reset()

    async def carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, until either end closes it."""
        if self._cut:
            writer.transport.abort()
            return
        host, _, port = self._target.rpartition(":")
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.transport.abort()
            return
        strand = _Strand(_pid_of(writer.get_extra_info("peername")[1]), [writer, far_writer])
        self._strands.add(strand)
        if not self._frozen.isdisjoint((None, strand.pid)):
            strand.freeze()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_pass(reader, far_writer, strand.requests_pass))
                tasks.create_task(self._pass_answers(far_reader, writer, strand.answers_pass))
        finally:
            self._strands.discard(strand)
            for end in strand.writers:
                end.transport.abort()

    async def _pass_answers(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event
    ) -> None:
        """In one go, or a drop at a time."""
        with suppress(OSError):
            while piece := await reader.read(PIECE_BYTES):
                await passes.wait()
                while piece and self._bytes_per_s is not None:
                    drop = round(self._bytes_per_s * DROP_S)
                    writer.write(piece[:drop])
                    piece = piece[drop:]
                    await asyncio.sleep(DROP_S)
                writer.write(piece)
                await writer.drain()
        writer.transport.abort()

    def _of(self, pid: int | None) -> Iterator[_Strand]:
        found = [strand for strand in self._strands if pid in (None, strand.pid)]
        assert found, f"no connection of {pid}"
        return iter(found)

    def _reset(self) -> None:
        for strand in self._strands:
            strand.requests_pass.set()
            strand.answers_pass.set()
            for writer in strand.writers:
                writer.transport.abort()


@asynccontextmanager
async def cable(address: str, target: str) -> AsyncIterator[Cable]:
    """A cable, laid until the block is left."""
    laid = Cable(address, target)
    host, _, port = address.rpartition(":")
    server = await asyncio.start_server(laid.carry, host, int(port))
    try:
        yield laid
    finally:
        server.close()
        laid.cut()


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, passes: asyncio.Event) -> None:
    with suppress(OSError):
        while piece := await reader.read(PIECE_BYTES):
            await passes.wait()
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()


def _pid_of(port: int) -> int | None:
    """Whose end of a loopback connection has this port. gRPC's sockets are IPv6, also to an IPv4 address."""
    return next((c.pid for c in psutil.net_connections("tcp") if c.laddr and c.laddr.port == port), None)
