"""What a simulated caller asks for, and how it behaves; a plan is made of these, and reads as one."""

from __future__ import annotations

from dataclasses import dataclass

from tailrace.v1 import generation_pb2


@dataclass(frozen=True, kw_only=True)
class Request:
    """The part of a GenerateRequest that a simulation varies. Times in seconds; 0: none."""

    prompt_ids: tuple[int, ...]
    request_id: str = ""
    n: int = 1
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: bool = False
    timeout_s: float = 0.0
    whole: bool = False
    detach: bool = False
    detach_ttl_s: float = 0.0
    retain_s: float = 0.0
    never_fail_over: bool = False

    def to_wire(self) -> generation_pb2.GenerateRequest:
        """As it is sent."""
        pb = generation_pb2.GenerateRequest(request_id=self.request_id)
        pb.token_ids.ids.extend(self.prompt_ids)
        options = pb.options
        options.n = self.n
        options.timeout_ms = round(self.timeout_s * 1000)
        options.retain_ms = round(self.retain_s * 1000)
        options.detach_ttl_ms = round(self.detach_ttl_s * 1000)
        if self.seed is not None:
            options.sampling.seed = self.seed
        stopping = options.stopping
        stopping.max_tokens, stopping.min_tokens = self.max_tokens, self.min_tokens
        stopping.stop.extend(self.stop)
        stopping.stop_token_ids.extend(self.stop_token_ids)
        stopping.include_stop_in_output, stopping.ignore_eos = self.include_stop, self.ignore_eos
        if self.logprobs:
            options.output.logprobs = 1
        if self.whole:
            options.delivery = generation_pb2.DELIVERY_WHOLE
        if self.detach:
            options.on_disconnect = generation_pb2.ON_DISCONNECT_DETACH
        if self.never_fail_over:
            options.failover = generation_pb2.FAILOVER_NEVER
        return pb


@dataclass(frozen=True, kw_only=True)
class Behaviour:
    """One caller: when it asks what, at which door, and what it does besides reading. Times in seconds.

    `leaves_after`, `aborts_after`: from when it asked. `vanishes`: it doesn't close its call, it is gone. `back_after`:
    how long it stays away; None: it never comes back. `pause_s`: between two events. `stops_reading_for`: once, at its
    third event. `deadline_s`: of the call itself.
    """

    name: str = ""
    at: float
    door: str
    request: Request
    deadline_s: float | None = None
    pause_s: float = 0.0
    stops_reading_for: float = 0.0
    leaves_after: float | None = None
    vanishes: bool = False
    back_after: float | None = None
    aborts_after: float | None = None
    waits_until_released: bool = False
