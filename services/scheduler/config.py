"""What a scheduler can be told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.runtime.config import ProcessConfig, option, require
from services.scheduler.admission import Limits
from services.scheduler.engine.api import EngineInfo
from services.scheduler.policy import Policy, PolicyName

EngineName = Literal["auto", "cpu", "torch", "fake"]
DtypeName = Literal["auto", "fp32", "bf16", "fp16"]
KvDtypeName = Literal["auto", "fp8"]
WeightsFormatName = Literal["auto", "int8", "int4", "bf16", "fp32"]
FakeModeName = Literal["hash", "echo"]


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig(ProcessConfig):
    """One scheduler process."""

    port: int = option(7003, help="port of the service; 0 picks a free one")
    admin_port: int = option(7103, help="port for operators (inspection, drain, health); 0 picks a free one")
    metrics_port: int = option(7203, help="port of /metrics; 0 picks a free one")

    model: Path | None = option(None, help="directory of the model: config.json, tokenizer.json, safetensors")
    model_id: str = option("", help="the model's name for callers; empty: the directory's own")
    engine: EngineName = option("auto", help="cpu, torch, fake (computes nothing, for tests), or auto: what fits")
    weights_format: WeightsFormatName = option(
        "auto", help="engine cpu: int8, int4, bf16, fp32 (exact), or auto: int4 for weights that had 4 bits, else int8"
    )
    dtype: DtypeName = option("auto", help="engine torch: fp32, bf16, fp16, or auto: fp32 on CPU, bf16 on GPU")
    kv_dtype: KvDtypeName = option("auto", help="engine torch: fp8 (a GPU from sm_89 on), or auto: the same as dtype")
    device: str = option("auto", help="auto, cpu or cuda[:n]")
    deterministic: bool = option(False, help="an answer depends bit for bit on its request alone; slower with torch")
    threads: int | None = option(None, help="CPU threads to compute with; none: one per core")

    draft_tokens: int | None = option(
        None,
        help="engine cpu: most ids guessed ahead, by what followed the same ids before; 0: none; none: 7",
    )

    context_length: int | None = option(None, help="longest sequence, tokens; none: the model's own")
    kv_tokens: int | None = option(None, help="size of the KV cache, tokens; none: by memory")
    kv_memory_bytes: int | None = option(None, help="size of the KV cache, bytes; none: a share of the memory")
    block_size: int = option(16, help="tokens per KV block")

    max_running: int = option(256, help="most sequences in the batch")
    max_waiting: int = option(1024, help="most sequences waiting for a place in it; more are refused")
    max_step_tokens: int | None = option(
        None, help="most tokens computed in one step, longer prompts take several; none: 256 with engine cpu, else 512"
    )
    queue_timeout_s: float = option(300.0, help="longest wait for a first place in the batch; then it ends as an error")
    policy: PolicyName = option("fcfs", help="who is next: first come, most of its prompt cached, or most urgent")
    priority_step_s: float = option(10.0, help="policy priority: the head start of one level over the level below")
    prefix_cache: bool = option(True, help="keep computed prompts and answers, so that equal beginnings are not redone")
    max_held: int = option(16384, help="most sequences remembered, ended but unreleased ones included")
    max_tombstones: int = option(65536, help="most released attempts remembered to refuse a late Submit")
    tombstone_ttl_s: float = option(300.0, help="how long each of them is remembered")
    lease_grace_s: float = option(60.0, help="how long attempts outlive their tokenizer's last call; then released")
    inference_gateway_names: bool = option(
        False, help="also serve the load under vLLM's names, which Kubernetes' inference gateway reads"
    )
    stall_timeout_s: float = option(30.0, help="a step longer than its size explains and this makes it not ready")

    fake_mode: FakeModeName = option("hash", help="fake engine: ids that look random, or the prompt again and again")
    fake_pace_ms: float = option(0.0, help="fake engine: steps end on multiples of this; 0: at once")
    fake_prefill_us_per_token: float = option(0.0, help="fake engine: microseconds spent per prompt token")
    fake_vocab_size: int = option(49152, help="fake engine without a model: number of ids")
    fake_eos_token_id: int = option(2, help="fake engine without a model: the end-of-text id")
    fake_first_id: int = option(17, help="fake engine: lowest id it gives")
    fake_end_id: int | None = option(None, help="fake engine: it gives ids below this; none: the vocabulary's end")
    fake_bad_output_id: int | None = option(None, help="fake engine: a prompt with this id fails")
    fake_step_error_id: int | None = option(None, help="fake engine: a prompt with this id breaks its whole step")

    def __post_init__(self) -> None:
        super().__post_init__()
        needs_model = self.engine != "fake"
        require(self, "model", not needs_model or self.model is not None, "must be set, or engine be fake")
        for key, engine in (("weights_format", "cpu"), ("dtype", "torch"), ("kv_dtype", "torch")):
            chosen = getattr(self, key) != "auto"
            require(self, key, not chosen or self.engine in (engine, "auto"), f"goes with engine {engine} alone")
        require(self, "device", self.engine != "cpu" or self.device in ("auto", "cpu"), "must be cpu for engine cpu")
        for key in ("dtype", "kv_dtype"):
            both = self.weights_format != "auto" and getattr(self, key) != "auto"
            require(self, key, not both, "goes with engine torch, and can't stand beside weights_format")
        for key in ("max_running", "block_size", "max_tombstones", "fake_vocab_size"):
            require(self, key, getattr(self, key) >= 1, "must be at least 1")
        for key in ("threads", "context_length", "kv_tokens", "kv_memory_bytes", "max_step_tokens"):
            value = getattr(self, key)
            require(self, key, value is None or value >= 1, "must be at least 1, or none")
        require(self, "kv_memory_bytes", None in (self.kv_tokens, self.kv_memory_bytes), "can't stand beside kv_tokens")
        drafts = self.draft_tokens or 0
        require(self, "draft_tokens", drafts >= 0, "must be 0 or more, or none")
        require(self, "draft_tokens", not drafts or self.engine != "torch", "goes with engine cpu or fake")
        require(self, "max_waiting", self.max_waiting >= 0, "must be 0 or more")
        enough = self.max_step_tokens is None or self.max_step_tokens >= self.max_running
        require(self, "max_step_tokens", enough, "must be at least max_running")
        least_held = self.max_running + self.max_waiting
        require(self, "max_held", self.max_held >= least_held, "must be at least max_running + max_waiting")
        require(self, "tombstone_ttl_s", self.tombstone_ttl_s > 0, "must be above 0")
        require(self, "lease_grace_s", self.lease_grace_s > 0, "must be above 0")
        require(self, "queue_timeout_s", self.queue_timeout_s > 0, "must be above 0")
        require(self, "priority_step_s", self.priority_step_s > 0, "must be above 0")
        require(self, "stall_timeout_s", self.stall_timeout_s > 0, "must be above 0")

    def limits_of(self, engine: EngineInfo) -> Limits:
        """What it takes on with this engine."""
        return Limits(
            max_running=self.max_running,
            max_waiting=self.max_waiting,
            max_step_tokens=self.max_step_tokens or max(engine.step_tokens, self.max_running),
            max_held=self.max_held,
            max_tombstones=self.max_tombstones,
            tombstone_ttl_s=self.tombstone_ttl_s,
            lease_grace_s=self.lease_grace_s,
            queue_timeout_s=self.queue_timeout_s,
            policy=Policy(name=self.policy, priority_step_s=self.priority_step_s),
            prefix_cache=self.prefix_cache,
        )
