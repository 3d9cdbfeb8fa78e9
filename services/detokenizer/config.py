"""What a detokenizer can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.runtime.config import ProcessConfig, option, require


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    """A detokenizer's configuration."""

    port: int = option(7002, help="port for tokenizers; 0 picks a free one")
    admin_port: int = option(7102, help="port for operators (inspection, drain, health); 0 picks a free one")
    metrics_port: int = option(7202, help="port of /metrics; 0 picks a free one")
    model: Path = option(help="directory of the served model; tokenizer.json and config.json are read")
    model_id: str = option("", help="the model's name; empty: the directory's name")
    schedulers: tuple[str, ...] = option(
        ("127.0.0.1:7003",), help="addresses (host:port) of the schedulers; no other one may be asked for"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "schedulers", bool(self.schedulers), "must name at least one")
