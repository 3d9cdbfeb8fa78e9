"""The network: calls between processes, in order each way until they break; its weather is the simulation's.

A call that breaks loses any suffix of what was on its way, and each side learns of it in its own time. A unary call may
be slow, lost before it took effect or after, or given up by its caller and yet arrive later. Between two hosts nothing
may pass for a while. A process that dies takes its calls along, at once, or, with its machine, without a word.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from tests.simulation.loop import ProcessLoop
from tests.simulation.world import World

if TYPE_CHECKING:
    from tests.simulation.channel import ClientCall
    from tests.simulation.server import ServerCall, SimServer

LATENCY_S = 0.0004
KEEPALIVE_S = 4.0
"""When a side notices that the other's machine is gone."""

FATES = ("lost", "answer lost", "overtaken", "slow")
"""What the weather may do to a unary call."""


class Lane:
    """One direction of a call. What is sent arrives in order, and not at all beyond the cut."""

    __slots__ = ("_cut_at", "_last", "_wire", "receiver", "sender")

    def __init__(self, wire: Wire, sender: str, receiver: str) -> None:
        self._wire = wire
        self.sender = sender
        self.receiver = receiver
        self._last = 0.0
        self._cut_at: float | None = None

    def send(self, act: Callable[[], object]) -> None:
        """Has something happen on the other side, after everything that was sent before."""
        network = self._wire.network
        arrival = max(self._last, network.arrival(self.sender, self.receiver))
        self._last = arrival
        network.world.at(arrival, partial(self._arrive, arrival, act))

    def hold_up(self, delay_s: float) -> None:
        """What is sent from now on takes so much longer, at first."""
        self._last = max(self._last, self._wire.network.world.now + delay_s)

    def cut(self, at: float) -> None:
        """What would arrive later doesn't."""
        self._cut_at = at if self._cut_at is None else min(self._cut_at, at)

    def _arrive(self, arrival: float, act: Callable[[], object]) -> None:
        if self._cut_at is None or arrival <= self._cut_at:
            act()


class Wire:
    """One call's two lanes, and who stands at their ends."""

    def __init__(self, network: Network, caller: ProcessLoop, host: str, client: ClientCall) -> None:
        self.network = network
        self.caller = caller
        self.host = host
        self.client = client
        self.server: ServerCall | None = None
        self.callee: ProcessLoop | None = None
        self.there = Lane(self, caller.name, host)
        self.back = Lane(self, host, caller.name)
        self.broken = False

    def to_server(self, act: Callable[[ServerCall], object]) -> None:
        """Something for the server's side; lost when there is none."""
        self.there.send(partial(self._at_server, act))

    def to_client(self, act: Callable[[ClientCall], object]) -> None:
        """Something for the client's side."""
        self.back.send(lambda: self.caller.deliver(act, self.client))

    def break_off(self, why: str, *, learn_s: float | None = None) -> None:
        """The connection under the call is gone; each side learns of it in a moment of its own, or after `learn_s`."""
        if self.broken:
            return
        self.broken = True
        world = self.network.world
        for lane in (self.there, self.back):
            lane.cut(world.now + world.random.uniform(0, 0.003))
        client_learns_s, server_learns_s = self.network.moment(), self.network.moment()
        world.after(client_learns_s if learn_s is None else learn_s, lambda: self._tell_client(why))
        world.after(server_learns_s if learn_s is None else learn_s, self._tell_server)
        self.network.forget(self)

    def _at_server(self, act: Callable[[ServerCall], object]) -> None:
        if self.callee is not None:
            self.callee.deliver(self._on_server, act)
        else:
            self.network.forget(self)

    def _on_server(self, act: Callable[[ServerCall], object]) -> None:
        # Looked up here: a paused process takes the call and what followed it when it wakes, in this order.
        if self.server is not None:
            act(self.server)

    def _tell_client(self, why: str) -> None:
        self.caller.deliver(self.client.broken, why)

    def _tell_server(self) -> None:
        if self.server is not None and self.callee is not None:
            self.callee.deliver(self.server.left)


class Network:
    """Who listens where, which calls are open, and the weather."""

    def __init__(self, world: World, *, window: int) -> None:
        self.world = world
        self.window = window
        self.servers: dict[str, SimServer] = {}
        self.dark: set[str] = set()
        """Hosts that answer nothing, not even a refusal."""
        self.unary_trouble = 0.0
        """How likely a unary call meets one of FATES."""
        self.late_calls: dict[str, float] = {}
        """How likely a unary call, such as "scheduler Submit", is given up and arrives later."""
        self.stream_trouble_s: float | None = None
        """After how long, on average, a stream is cut; None: never."""
        self._blocked_until: dict[frozenset[str], float] = {}
        self._slow_until: dict[str, tuple[float, float]] = {}
        self._wires: dict[Wire, None] = {}

    def moment(self) -> float:
        """How long news of a break takes."""
        return self.world.random.uniform(0, 0.02)

    def arrival(self, sender: str, receiver: str) -> float:
        """When what is sent now would arrive."""
        world = self.world
        start = world.now
        if self._blocked_until:
            start = max(start, self._blocked_until.get(frozenset((sender, receiver)), 0.0))
        latency = LATENCY_S * (0.5 + world.random.random())
        if self._slow_until:
            for host in (sender, receiver):
                until, extra_s = self._slow_until.get(host, (0.0, 0.0))
                if world.now < until:
                    latency += extra_s * world.random.random()
        return start + latency

    def block(self, one: str, other: str, duration_s: float) -> None:
        """For a while nothing passes between two hosts; then all of it does."""
        key = frozenset((one, other))
        self._blocked_until[key] = max(self._blocked_until.get(key, 0.0), self.world.now + duration_s)

    def slow_down(self, host: str, duration_s: float, extra_s: float) -> None:
        """For a while everything to and from a host takes up to so much longer."""
        self._slow_until[host] = (self.world.now + duration_s, extra_s)

    def clear_up(self) -> None:
        """Fine weather from now on; what was held up is on its way."""
        self.unary_trouble = 0.0
        self.late_calls.clear()
        self.stream_trouble_s = None
        self._slow_until.clear()

    def cut(self, one: str, other: str) -> None:
        """Every call between two hosts breaks."""
        for wire in list(self._wires):
            if {wire.caller.name, wire.host} == {one, other}:
                wire.break_off("connection reset by peer")

    def died(self, loop: ProcessLoop, *, silently: bool) -> None:
        """A process is gone, and with it its ports and the calls that it made and served."""
        self.servers = {address: server for address, server in self.servers.items() if server.loop is not loop}
        for wire in list(self._wires):
            if loop in (wire.caller, wire.callee):
                wire.break_off("socket closed", learn_s=KEEPALIVE_S if silently else None)

    def open(self, wire: Wire, address: str, *, streams: bool) -> None:
        """Knocks at an address for a new call."""
        self._wires[wire] = None
        # A connection goes to one incarnation: what is on its way to a dead one never arrives at the next.
        knock = partial(self._knock, wire, address, self.servers.get(address))
        world = self.world
        if streams:
            if self.stream_trouble_s is not None:
                world.after(world.random.expovariate(1 / self.stream_trouble_s), partial(self._cut_stream, wire))
        elif fate := self._fate_of(f"{wire.host.partition('-')[0]} {wire.client.method}"):
            world.count(f"unary call: {fate}")
            world.tell(wire.caller.name, f"(its {wire.client.method} is going to be {fate})")
            if fate == "lost":
                wire.break_off("connection reset by peer")
                return
            if fate == "overtaken":
                world.after(self.moment() * 10, lambda: wire.caller.deliver(wire.client.broken, "connection reset"))
            if fate in ("overtaken", "slow"):
                wire.there.hold_up(world.random.uniform(0.0, 4.0))
            wire.client.answer_is_lost = fate == "answer lost"
        wire.there.send(knock)

    def forget(self, wire: Wire) -> None:
        """The call is over on both sides."""
        self._wires.pop(wire, None)

    def _fate_of(self, what: str) -> str:
        """What becomes of a unary call; empty: it goes well."""
        random = self.world.random
        if what in self.late_calls and random.random() < self.late_calls[what]:
            return "overtaken"
        if self.unary_trouble and random.random() < self.unary_trouble:
            return FATES[random.randrange(len(FATES))]
        return ""

    def _cut_stream(self, wire: Wire) -> None:
        if wire in self._wires and self.stream_trouble_s is not None:
            self.world.count("stream cut")
            wire.break_off("connection reset by peer")

    def _knock(self, wire: Wire, address: str, meant: SimServer | None) -> None:
        server = self.servers.get(address)
        if meant is not None and meant is not server:
            wire.break_off("connection reset by peer")
        elif server is not None:
            wire.callee = server.loop
            server.loop.deliver(server.accept, wire)
        elif wire.host in self.dark:
            self.world.after(KEEPALIVE_S, lambda: wire.caller.deliver(wire.client.broken, "connect timed out"))
        else:
            wire.break_off(f"failed to connect to {address}: connection refused")
