"""The gateway's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.runtime.config import ProcessConfig, option, require


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """What the gateway can be told; gRPC is served on `port`, the OpenAI-compatible API on `http_port`."""

    port: int = option(7000, help="port of GenerationService; 0 picks a free one")
    admin_port: int = option(7100, help="port for operators (inspection, drain, health); 0 picks a free one")
    metrics_port: int = option(7200, help="port of /metrics; 0 picks a free one")
    http_port: int = option(8000, help="port of the OpenAI-compatible HTTP API; 0 picks a free one")
    tokenizers: tuple[str, ...] = option(("127.0.0.1:7001",), help="addresses of the tokenizers, host:port each")
    api_keys_file: Path | None = option(None, help="TOML file of tenants and their keys; without it nobody needs a key")
    open_requests_max: int = option(4096, help="requests that may be open at once; more are refused as overload")
    connections_max: int = option(8192, help="HTTP connections that may be open at once; more are refused")
    headers_timeout_s: float = option(30.0, help="how long an HTTP connection may take to send a request's headers")
    body_timeout_s: float = option(30.0, help="how long an HTTP request's body may take to arrive")
    body_max_bytes: int = option(4 << 20, help="largest body of an HTTP request")
    slow_reader_timeout_s: float = option(60.0, help="a caller that takes nothing for so long is ended")
    tokenizer_grace_s: float = option(30.0, help="how long streams wait for a tokenizer to go on")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "http_port", 0 <= self.http_port <= 65535, "must be 0 to 65535")
        require(self, "tokenizers", bool(self.tokenizers), "must name at least one tokenizer")
        for key in ("open_requests_max", "connections_max", "body_max_bytes"):
            require(self, key, getattr(self, key) >= 1, "must be 1 or more")
        for key in ("headers_timeout_s", "body_timeout_s", "slow_reader_timeout_s"):
            require(self, key, getattr(self, key) > 0, "must be above 0")
        require(self, "tokenizer_grace_s", self.tokenizer_grace_s >= 0, "must be 0 or more")
