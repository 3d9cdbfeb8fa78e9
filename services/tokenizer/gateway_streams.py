"""Gateways and their streams: which answers each gateway reads, and what its event stream still has to carry.

A gateway is known by its epoch, from its first StreamEvents call on. When that call is lost, the same epoch may open
another and gets its streams from their beginning (it compares); without one for a grace, its callers count as gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from services.protocol.answer import NO_OFFSETS, Offsets
from services.protocol.outbox import Outbox
from services.protocol.sender import Sender
from services.runtime.error_tree import AlreadyExists, InvalidRequest, Superseded, Unavailable
from services.tokenizer.columns import EventColumns, StreamCursor
from services.tokenizer.entry import Entry

EndStream = Callable[[Entry, bool], None]
"""Told when a stream has ended on the caller's side: the entry, and whether the caller had the terminal event."""


MAX_BURIED = 16_384
"""Streams of one gateway that were released before they were opened; beyond it the oldest is forgotten."""


class GatewayStream:
    """One answer on its way to a gateway; a Reader of its entry."""

    __slots__ = ("_cut", "_offsets", "cursor", "entry", "gateway", "stream_id")

    def __init__(self, gateway: Gateway, stream_id: int, entry: Entry, offsets: Offsets) -> None:
        self.gateway = gateway
        self.stream_id = stream_id
        self.entry = entry
        self._offsets = offsets
        self._cut = False
        self.cursor = self._new_cursor()

    def mark(self) -> None:
        """The answer has something new."""
        call = self.gateway.call
        if call is not None:
            call.mark(self)

    def token_offset(self, choice: int) -> int:
        """Tokens of a choice that were sent."""
        return self.cursor.token_offset(choice)

    def take_into(self, columns: EventColumns) -> bool:
        """What is new of the answer, or, once, that it was cut; nothing follows that. True where it did not fit."""
        if self._cut:
            return False
        if self.entry.cut is None:
            return self.cursor.take_into(columns)
        self._cut = True
        columns.cuts.append((self.stream_id, self.entry.cut))
        return False

    def rewind(self) -> None:
        """Back to where it began, for a new call."""
        self._cut = False
        self.cursor = self._new_cursor()

    def _new_cursor(self) -> StreamCursor:
        whole = self.entry.pinned.request.whole
        return StreamCursor(self.entry.log, self.stream_id, whole=whole, offsets=self._offsets)


class Gateway:
    """One incarnation of a gateway. `lost_at`: since when it has no call, monotonic seconds; None while it has one."""

    __slots__ = ("_buried", "call", "epoch", "lost_at", "streams")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self.streams: dict[int, GatewayStream] = {}
        self.call: GatewayCall | None = None
        self.lost_at: float | None = None
        self._buried: dict[int, None] = {}

    def add(self, stream_id: int, entry: Entry, offsets: Offsets = NO_OFFSETS) -> GatewayStream:
        """A stream for an entry; `check_new` has said that its number is free.

        Raises ValueError for offsets beyond what the entry has. What there is already, it will carry.
        """
        stream = GatewayStream(self, stream_id, entry, offsets)
        self.streams[stream_id] = stream
        entry.readers.append(stream)
        stream.mark()
        return stream

    def check_new(self, stream_id: int) -> None:
        """Raises AlreadyExists for a number that is in use, Superseded for one whose caller has already left."""
        if stream_id in self.streams:
            raise AlreadyExists(f"stream {stream_id}")
        if stream_id in self._buried:
            raise Superseded("the caller left before the request was opened")

    def bury(self, stream_id: int) -> None:
        """The caller of a stream that is not known has left: should its Open come late, it is refused."""
        self._buried[stream_id] = None
        if len(self._buried) > MAX_BURIED:
            del self._buried[next(iter(self._buried))]

    def remove(self, stream_id: int) -> GatewayStream | None:
        """Takes a stream out; None when it is not known, which is to say already out."""
        stream = self.streams.pop(stream_id, None)
        if stream is not None:
            stream.entry.drop(stream)
        return stream


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether new requests can be served now; `why_not` is for people."""

    ready: bool
    why_not: str = ""


class GatewayCall:
    """One StreamEvents call: takes what is beyond its streams' cursors, live ones before those replayed."""

    def __init__(self, streams: Iterable[GatewayStream], readiness: Readiness) -> None:
        self._outbox: Outbox[GatewayStream] = Outbox(streams)
        self._readiness: Readiness | None = readiness
        self._superseded = False
        self._closing = False
        self.sender: Sender[EventColumns | Readiness] = Sender(self.take, EventColumns)

    def tell(self, readiness: Readiness) -> None:
        """The readiness has changed."""
        self._readiness = readiness
        self.sender.wake()

    def mark(self, stream: GatewayStream) -> None:
        """The stream has something new."""
        self._outbox.mark(stream)
        self.sender.wake()

    def supersede(self) -> None:
        """A newer call of the same gateway has come; this one ends."""
        self._superseded = True
        self.sender.wake()

    def close(self) -> None:
        """The process stops: the call ends once everything is taken."""
        self._closing = True
        self.sender.wake()

    def take(self) -> EventColumns | Readiness | None:
        """The next message, or None when there is nothing. Raises Superseded once a newer call has come.

        Raises Unavailable once the process stops and everything is taken.
        """
        if self._superseded:
            raise Superseded("a newer StreamEvents call of this gateway has come")
        if self._readiness is not None:
            readiness, self._readiness = self._readiness, None
            return readiness
        columns = EventColumns()
        live = iter(self._outbox.take_live())
        for stream in live:
            has_more = stream.take_into(columns)
            if columns.is_full:
                self._outbox.mark_all(live)  # the others come first
            if has_more:
                self._outbox.mark(stream)
        while not columns.is_full and (replayed := self._outbox.take_replay()) is not None:
            if replayed.take_into(columns):
                self._outbox.put_back(replayed)
        if not columns and self._closing:
            raise Unavailable("the tokenizer is stopping")
        return columns or None


class Gateways:
    """Every gateway that is connected, or may come back."""

    def __init__(self, end_stream: EndStream, *, grace_s: float) -> None:
        self._end_stream = end_stream
        self._grace_s = grace_s
        self._gateways: dict[int, Gateway] = {}
        self._readiness = Readiness(False, "it is starting")

    def __iter__(self) -> Iterator[Gateway]:
        return iter(self._gateways.values())

    def get(self, epoch: int) -> Gateway:
        """A gateway that has opened its event stream. Raises Unavailable: one that was lost opens it again."""
        gateway = self._gateways.get(epoch)
        if gateway is None:
            raise Unavailable("this gateway has no StreamEvents call here; open it first", reason="NO_EVENT_STREAM")
        return gateway

    def connect(self, epoch: int) -> GatewayCall:
        """A new call; an older one of the same epoch ends, and the streams start over."""
        if epoch == 0:
            raise InvalidRequest("gateway.epoch", "must not be 0")
        gateway = self._gateways.setdefault(epoch, Gateway(epoch))
        if gateway.call is not None:
            gateway.call.supersede()
        for stream in gateway.streams.values():
            stream.rewind()
        gateway.call = GatewayCall(gateway.streams.values(), self._readiness)
        gateway.lost_at = None
        return gateway.call

    def disconnect(self, epoch: int, call: GatewayCall, now: float) -> None:
        """A call is over; if it was the gateway's newest, its grace begins."""
        gateway = self._gateways.get(epoch)
        if gateway is not None and gateway.call is call:
            gateway.call = None
            gateway.lost_at = now

    def release(self, epoch: int, stream_id: int, *, delivered: bool) -> None:
        """A stream has ended on the caller's side; one that is not known is out already, or its Open is yet to come.

        Raises Unavailable when a caller has left a gateway without an event stream: nothing here would remember that.
        """
        if delivered and epoch not in self._gateways:
            return
        gateway = self.get(epoch)
        stream = gateway.remove(stream_id)
        if stream is not None:
            self._end_stream(stream.entry, delivered)
        elif not delivered:
            gateway.bury(stream_id)

    def tell(self, readiness: Readiness) -> None:
        """Whether new requests can be served has changed, or why not: every gateway is told."""
        if readiness == self._readiness:
            return
        self._readiness = readiness
        for gateway in self:
            if gateway.call is not None:
                gateway.call.tell(readiness)

    def close(self) -> None:
        """The process stops: every call ends once its gateway has everything."""
        for gateway in self:
            if gateway.call is not None:
                gateway.call.close()

    def expire(self, now: float) -> None:
        """Gives up gateways that were away for longer than the grace: their callers are gone."""
        for gateway in list(self._gateways.values()):
            if gateway.lost_at is not None and now >= gateway.lost_at + self._grace_s:
                del self._gateways[gateway.epoch]
                for stream_id in list(gateway.streams):
                    self._drop(gateway, stream_id)

    def _drop(self, gateway: Gateway, stream_id: int) -> None:
        stream = gateway.remove(stream_id)
        if stream is not None:
            self._end_stream(stream.entry, False)
