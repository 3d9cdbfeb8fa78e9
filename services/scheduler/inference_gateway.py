"""The scheduler's load under the names that Kubernetes' inference gateway reads, which are vLLM's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.scheduler.effects import Load


class InferenceGatewayNames(Collector):
    """Five gauges, read from the load whenever somebody asks; `model_id` is their label `model_name`."""

    def __init__(self, load: Callable[[], Load], model_id: str, registry: CollectorRegistry) -> None:
        self._load = load
        self._model_id = model_id
        registry.register(self)

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        load = self._load()
        used = load.total_blocks - load.free_blocks - load.cached_blocks
        yield self._gauge("num_requests_waiting", "Sequences in the queue.", load.waiting_sequences)
        yield self._gauge("num_requests_running", "Sequences in the batch.", load.running_sequences)
        yield self._gauge("kv_cache_usage_perc", "KV blocks in use, 0 to 1.", used / max(load.total_blocks, 1))
        sizes = {"block_size": str(load.block_size), "num_gpu_blocks": str(load.total_blocks)}
        yield self._gauge("cache_config_info", "Always 1; says how large the KV cache is.", 1, sizes)
        adapters = {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        yield self._gauge("lora_requests_info", "Always 1; says which adapters are in use.", 1, adapters)

    def _gauge(self, name: str, says: str, value: float, labels: dict[str, str] | None = None) -> Metric:
        labels = {"model_name": self._model_id, **(labels or {})}
        family = GaugeMetricFamily(f"vllm:{name}", says, labels=list(labels))
        family.add_metric(list(labels.values()), value)
        return family
