"""What a tokenizer can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.runtime.config import ProcessConfig, option, require


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """A tokenizer's configuration."""

    port: int = option(7001, help="port for gateways and direct callers; 0 picks a free one")
    admin_port: int = option(7101, help="port for operators (inspection, drain, health); 0 picks a free one")
    metrics_port: int = option(7201, help="port of /metrics; 0 picks a free one")
    model: Path = option(help="directory of the served model")
    model_id: str = option("", help="the model's name in requests; empty: the directory's name")
    schedulers: tuple[str, ...] = option(("127.0.0.1:7003",), help="addresses (host:port) of the schedulers")
    detokenizers: tuple[str, ...] = option(
        ("127.0.0.1:7002",), help="addresses (host:port) of the detokenizers; routes move from one to the next"
    )
    max_open_requests: int = option(4096, help="most requests in the ledger; more are refused")
    max_prompt_bytes: int = option(4 << 20, help="longest prompt text, in UTF-8, that is encoded at all")
    submit_timeout_s: float = option(5.0, help="how long Submit is tried before the request is refused")
    slow_reader_timeout_s: float = option(60.0, help="a direct caller that takes nothing for so long is ended")
    gateway_grace_s: float = option(30.0, help="how long a gateway's requests outlive its event stream")
    detach_ttl_s: float = option(60.0, help="how long a detached request waits for its caller, if it names no time")
    max_kept_answers: int = option(1024, help="most requests that are to be detached or retained; more are refused")
    max_kept_bytes: int = option(256 << 20, help="most memory that they may come to take; more are refused")
    show_content: bool = option(False, help="operators may see prompts and outputs on the admin port, when they ask")
    engine_grace_s: float = option(60.0, help="how long a request whose scheduler died waits for one to go on with")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "schedulers", bool(self.schedulers), "must name at least one")
        require(self, "detokenizers", bool(self.detokenizers), "must name at least one")
        require(self, "max_open_requests", self.max_open_requests >= 1, "must be at least 1")
        require(self, "max_prompt_bytes", self.max_prompt_bytes >= 1, "must be at least 1")
        require(self, "max_kept_answers", self.max_kept_answers >= 0, "must be at least 0")
        require(self, "max_kept_bytes", self.max_kept_bytes >= 0, "must be at least 0")
        for key in ("submit_timeout_s", "slow_reader_timeout_s", "gateway_grace_s", "engine_grace_s", "detach_ttl_s"):
            require(self, key, getattr(self, key) > 0, "must be above 0")
