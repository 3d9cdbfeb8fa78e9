"""Writes Grafana's dashboards, deploy/grafana/dashboards/*.json, from a table of panels; `make reference` runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "grafana/dashboards"
WIDTH, HEIGHT, PER_ROW = 8, 7, 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One picture: its title, its unit as Grafana calls it, and its series as (expression, legend)."""

    title: str
    unit: str
    series: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """A page of pictures."""

    uid: str
    title: str
    panels: Sequence[Panel]


def _quantiles(histogram: str) -> list[tuple[str, str]]:
    return [
        (f"histogram_quantile({q}, sum by (le) (rate({histogram}_bucket[1m])))", f"p{q * 100:g}")
        for q in (0.5, 0.9, 0.99)
    ]


OVERVIEW = Dashboard(
    "tailrace-overview",
    "Tailrace: overview",
    [
        Panel("Processes that answer", "none", [("sum by (job) (up)", "{{job}}")]),
        Panel("Output tokens", "short", [("tailrace:output_tokens:rate1m", "tokens/s")]),
        Panel("Requests that ended", "reqps", [("tailrace:requests:rate1m", "{{reason}}")]),
        Panel("Open requests", "none", [("sum by (phase) (tailrace_tokenizer_open_requests)", "{{phase}}")]),
        Panel("Time to first token", "s", _quantiles("tailrace_tokenizer_time_to_first_token_seconds")),
        Panel("Between tokens", "s", _quantiles("tailrace_tokenizer_inter_token_latency_seconds")),
        Panel("Waiting and running", "none", [
            ("sum(tailrace_scheduler_waiting)", "waiting"), ("sum(tailrace_scheduler_running)", "running"),
        ]),
        Panel("KV blocks in use", "percentunit", [("tailrace:kv_used:ratio", "{{instance}}")]),
        Panel("Errors", "percentunit", [("tailrace:errors:ratio5m or vector(0)", "of all answers")]),
    ],
)  # fmt: skip

LOOP = Dashboard(
    "tailrace-loop",
    "Tailrace: the loop",
    [
        Panel("Silence on streams", "s", [("max by (job, hop) (tailrace_hop_silence_seconds)", "{{hop}} at {{job}}")]),
        Panel("Lag of what arrives", "s", [
            ("max by (job, hop) (tailrace_hop_lag_seconds)", "{{hop}} at {{job}}"),
        ]),
        Panel("Streams that are down", "none", [("sum by (job, hop) (tailrace_hops_down)", "{{hop}} at {{job}}")]),
        Panel("Tokens that wait", "none", [
            ("sum(tailrace_scheduler_unsent_tokens)", "in the scheduler"),
            ("sum(tailrace_detokenizer_held_tokens)", "held back in the detokenizer"),
            ("sum(tailrace_tokenizer_unsent_tokens)", "in the tokenizer"),
            ("sum(tailrace_gateway_unread_tokens)", "at the gateway"),
        ]),
        Panel("Tokens past each place", "short", [
            ("sum(rate(tailrace_scheduler_output_tokens_total[1m]))", "generated"),
            ("sum(rate(tailrace_detokenizer_output_tokens_total[1m]))", "detokenized"),
            ("sum(rate(tailrace_tokenizer_output_tokens_total[1m]))", "merged"),
            ("sum(rate(tailrace_gateway_output_tokens_total[1m]))", "written to callers at their ends"),
        ]),
        Panel("Callers that stand still, the longest", "s", [
            ("max(tailrace_gateway_unread_seconds)", "of a gateway"),
            ("max(tailrace_tokenizer_unread_seconds)", "of a tokenizer, directly"),
        ]),
        Panel("Oldest", "s", [
            ("max(tailrace_gateway_oldest_request_age_seconds)", "answer at a gateway"),
            ("max(tailrace_tokenizer_oldest_request_age_seconds)", "request in a tokenizer"),
            ("max(tailrace_scheduler_oldest_attempt_age_seconds)", "attempt in a scheduler"),
        ]),
        Panel("From the end to release", "s", _quantiles("tailrace_tokenizer_finish_to_release_seconds")),
        Panel("Attempts by phase", "none", [("sum by (phase) (tailrace_tokenizer_open_attempts)", "{{phase}}")]),
        Panel("Said again, late or for nothing", "short", [
            ("sum(rate(tailrace_tokenizer_duplicates_dropped_total[1m]))", "duplicates dropped"),
            ("sum(rate(tailrace_tokenizer_late_tokens_total[1m]))", "after the answer's end"),
            ("sum(rate(tailrace_detokenizer_wasted_tokens_total[1m]))", "after a stop text"),
            ("sum(rate(tailrace_scheduler_merged_tokens_total[1m]))", "merged into one row"),
        ]),
        Panel("Routes, failovers, resumes", "short", [
            ("sum(rate(tailrace_tokenizer_route_opens_total[1m]))", "routes opened"),
            ("sum(rate(tailrace_tokenizer_failovers_total[1m]))", "failovers"),
            ("sum(rate(tailrace_tokenizer_resumes_total[1m]))", "resumes"),
            ("sum(rate(tailrace_scheduler_replayed_sequences_total[1m]))", "sequences replayed"),
            ("sum(rate(tailrace_gateway_slow_readers_total[1m]))", "slow readers ended"),
        ]),
        Panel("Answers whose tokenizer was lost", "none", [
            ("sum(tailrace_gateway_open_stranded_streams)", "waiting"),
            ("sum by (outcome) (increase(tailrace_gateway_stranded_total[5m]))", "{{outcome}}, in 5 minutes"),
        ]),
        Panel("Event loop lag", "s", [
            ("histogram_quantile(0.99, sum by (le, job) (rate(tailrace_event_loop_lag_seconds_bucket[1m])))",
             "{{job}}"),
        ]),
        Panel("CPU", "percentunit", [("sum by (job) (rate(process_cpu_seconds_total[1m]))", "{{job}}")]),
        Panel("Memory", "bytes", [("sum by (job) (process_resident_memory_bytes)", "{{job}}")]),
    ],
)  # fmt: skip

SCHEDULER = Dashboard(
    "tailrace-scheduler",
    "Tailrace: scheduler",
    [
        Panel("Queue", "none", [("tailrace_scheduler_waiting", "waiting at {{instance}}")]),
        Panel("Batch", "none", [
            ("tailrace_scheduler_running", "running at {{instance}}"),
            ("sum(rate(tailrace_scheduler_batch_size_sum[1m])) / sum(rate(tailrace_scheduler_batch_size_count[1m]))",
             "in a step, on average"),
        ]),
        Panel("KV blocks", "none", [
            ("sum(tailrace_scheduler_blocks_free)", "free"), ("sum(tailrace_scheduler_blocks_cached)", "cached"),
            ("sum(tailrace_scheduler_blocks_capacity)", "all"),
        ]),
        Panel("Time in the queue", "s", _quantiles("tailrace_scheduler_queue_seconds")),
        Panel("Prefill", "s", _quantiles("tailrace_scheduler_prefill_seconds")),
        Panel("Decode", "s", _quantiles("tailrace_scheduler_decode_seconds")),
        Panel("Step, by kind", "s", [
            (("sum by (kind) (rate(tailrace_scheduler_step_seconds_sum[1m]))"
             " / sum by (kind) (rate(tailrace_scheduler_step_seconds_count[1m]))"), "{{kind}}"),
        ]),
        Panel("Tokens", "short", [
            ("sum(rate(tailrace_scheduler_prompt_tokens_total[1m]))", "prompt"),
            ("sum(rate(tailrace_scheduler_cached_tokens_total[1m]))", "prompt, from the cache"),
            ("sum(rate(tailrace_scheduler_output_tokens_total[1m]))", "output"),
            ("sum(rate(tailrace_scheduler_accepted_tokens_total[1m]))", "output, by right guesses"),
            ("sum(rate(tailrace_scheduler_drafted_tokens_total[1m]))", "guessed"),
        ]),
        Panel("Preemptions and refusals", "short", [
            ("sum(rate(tailrace_scheduler_preemptions_total[1m]))", "preemptions"),
            ("sum by (reason) (rate(tailrace_scheduler_refused_total[1m])) or vector(0)", "refused {{reason}}"),
        ]),
    ],
)  # fmt: skip

OBJECTIVES = Dashboard(
    "tailrace-objectives",
    "Tailrace: objectives",
    [
        Panel("First tokens later than a second", "percentunit", [
            ("tailrace:ttft_slow:ratio5m or vector(0)", "5 minutes"),
            ("tailrace:ttft_slow:ratio1h or vector(0)", "1 hour"),
        ]),
        Panel("Burn rate of the budget (1 in 100)", "none", [
            ("tailrace:ttft_slow:ratio5m / 0.01 or vector(0)", "5 minutes"),
            ("tailrace:ttft_slow:ratio1h / 0.01 or vector(0)", "1 hour"),
        ]),
        Panel("Time per output token", "s", _quantiles("tailrace_tokenizer_time_per_output_token_seconds")),
        Panel("To acceptance", "s", _quantiles("tailrace_tokenizer_acceptance_seconds")),
        Panel("End to end", "s", _quantiles("tailrace_tokenizer_end_to_end_seconds")),
        Panel("Callers' outcomes", "reqps", [
            ("sum by (outcome) (rate(tailrace_gateway_requests_total[1m]))", "{{outcome}}"),
        ]),
        Panel("Integrity errors", "none", [
            ("sum(increase(tailrace_tokenizer_integrity_errors_total[1h]))", "in 1 hour"),
        ]),
        Panel("Alerts that fire", "none", [
            ('count by (alertname) (ALERTS{alertstate="firing"}) or vector(0)', "{{alertname}}"),
        ]),
    ],
)  # fmt: skip

DASHBOARDS = (OVERVIEW, LOOP, SCHEDULER, OBJECTIVES)


def files() -> Iterator[tuple[str, str]]:
    """Name and content of each."""
    for dashboard in DASHBOARDS:
        yield f"{dashboard.uid}.json", json.dumps(_dashboard(dashboard), indent=1, ensure_ascii=False) + "\n"


def _dashboard(dashboard: Dashboard) -> dict[str, Any]:
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["tailrace"],
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-15m", "to": "now"},
        "links": [{"type": "dashboards", "title": "Tailrace", "tags": ["tailrace"], "asDropdown": False}],
        "panels": [_panel(panel, number) for number, panel in enumerate(dashboard.panels)],
    }


def _panel(panel: Panel, number: int) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "prometheus"}
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"x": number % PER_ROW * WIDTH, "y": number // PER_ROW * HEIGHT, "w": WIDTH, "h": HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}},
        "targets": [
            {"refId": chr(ord("A") + at), "datasource": source, "expr": expression, "legendFormat": legend}
            for at, (expression, legend) in enumerate(panel.series)
        ],
    }


if __name__ == "__main__":
    for name, content in files():
        (FOLDER / name).write_text(content)
