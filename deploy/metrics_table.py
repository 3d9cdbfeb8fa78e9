"""Prints docs/metrics.md: every metric of every process, as it is declared. `make reference` writes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric

from services.runtime import metrics

HEAD = """# Metrics

Every process serves them at `/metrics` on its own port; [operations](operations.md) says which alerts and dashboards
stand on them. This table is written by `make reference`, from where they are declared. Units are the last part of a
name; a label takes only the values that are listed, or a bounded set of ours, and none grows with what callers send.

Two sums hold whenever nothing is open, whatever the ends were: `tailrace_tokenizer_accepted_total` is the sum of
`tailrace_tokenizer_requests_total` over its reasons, and `tailrace_scheduler_accepted_total` that of
`tailrace_scheduler_ended_total`. Every gauge of something open is 0 then.

A scheduler that is started with `--inference-gateway-names` also serves its load under the five names that Kubernetes'
inference gateway reads: `vllm:num_requests_waiting`, `vllm:num_requests_running`, `vllm:kv_cache_usage_perc`,
`vllm:cache_config_info` and `vllm:lora_requests_info`.
"""

SERVICES: dict[str, Callable[[CollectorRegistry], object]] = {
    "Every process": lambda registry: metrics.RuntimeMetrics(registry, service=""),
    "Gateway": metrics.GatewayMetrics,
    "Tokenizer": metrics.TokenizerMetrics,
    "Detokenizer": metrics.DetokenizerMetrics,
    "Scheduler": metrics.SchedulerMetrics,
}

LABELS = {"hop": metrics.HOPS, "reason": (), "version": (), "service": ()}
"""Of labels whose values don't all stand from the start, those that are known."""


def table() -> str:
    """The whole document."""
    return HEAD + "".join(_section(title, make) for title, make in SERVICES.items())


def _section(title: str, make: Callable[[CollectorRegistry], object]) -> str:
    registry = CollectorRegistry()
    made = make(registry)
    rows = "".join(map(_row, _described(registry, vars(made).values())))
    return f"\n## {title}\n\n| metric | kind | labels | what it says |\n|---|---|---|---|\n{rows}"


def _described(registry: CollectorRegistry, declared: Iterable[object]) -> Iterable[tuple[Metric, tuple[str, ...]]]:
    names = [tuple(getattr(metric, "_labelnames", ())) for metric in declared]
    return zip(registry.collect(), names, strict=True)


def _row(described: tuple[Metric, tuple[str, ...]]) -> str:
    family, names = described
    name = f"{family.name}_total" if family.type == "counter" else family.name
    labels = "; ".join(_label(family, label) for label in names)
    return f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"


def _label(family: Metric, label: str) -> str:
    values = dict.fromkeys(sample.labels[label] for sample in family.samples if label in sample.labels)
    known = LABELS.get(label) or [value for value in values if value]
    return f"`{label}`: {', '.join(known)}" if known else f"`{label}`"


if __name__ == "__main__":
    print(table(), end="")
