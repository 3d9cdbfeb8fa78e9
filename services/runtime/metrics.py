"""Every metric of every process, declared once: name, unit, labels, and what it counts.

One class per service, bound to a registry given to it, so that several processes' metrics can live in one test. An
attribute is the metric's name without `tailrace_<service>_`. The values that a label can take are listed here and stand
at 0 from the start, so that rates and sums are right from the first event on.

On hot paths keep children (`metrics.requests_total.labels("STOP")`) and count per batch (`inc(n)`), not per token;
what has to be observed per token is a TokenHistogram.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, GCCollector, Histogram, ProcessCollector

from services.runtime import __version__
from services.runtime.phase import Phase
from services.runtime.token_histogram import TokenHistogram

FINISH_REASONS = ("STOP", "LENGTH", "ABORTED", "DEADLINE", "ERROR")
LET_GO = ("CLAIMED", "LEFT", "LOST")
CALLER_PHASES = ("OPEN", "FINISHED", "DETACHED", "GONE")
ENGINE_PHASES = ("SUBMITTING", "RUNNING", "ENDED", "RELEASING")
TRANSPORTS = ("grpc", "http")
OUTCOMES = ("completed", "refused", "cancelled", "failed")
RESUME_OUTCOMES = ("resumed", "refused")
STRANDED_OUTCOMES = ("found", "cut", "left")
SPAN_OUTCOMES = ("exported", "failed")
STEP_KINDS = ("prefill", "decode", "mixed")
HOPS = ("tokens", "text", "events", "load")

UNREAD_SECONDS = "For how long the caller that stands still the longest has taken nothing of what waits for it here."

# Upper bounds in seconds. Fine where people feel a difference, coarse beyond.
_TO_FIRST_TOKEN = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_BETWEEN_TOKENS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10, 40)
_END_TO_END = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_IN_QUEUE = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 240, 480, 960)
_STEP = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)
_RELEASE = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_LAG = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_BATCH_SIZE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def new_registry() -> CollectorRegistry:
    """A registry for one process, with what is told of every Python process: CPU, memory, descriptors, collections."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def count_of(counter: Counter) -> int:
    """What a counter stands at, over all its labels."""
    return round(sum(s.value for family in counter.collect() for s in family.samples if s.name.endswith("_total")))


class RuntimeMetrics:
    """What every process tells of itself; `tailrace_` with no service, which is a label of the build."""

    def __init__(self, registry: CollectorRegistry, *, service: str) -> None:
        self.build_info = Gauge(
            "tailrace_build_info", "Always 1; says what runs.", ["version", "service"], registry=registry
        )
        self.build_info.labels(__version__, service).set(1)
        self.phase = Gauge("tailrace_phase", "1 for the phase the process is in.", ["phase"], registry=registry)
        _each(self.phase, [phase.value for phase in Phase])
        self.ready = Gauge("tailrace_ready", "1 while new work is taken.", registry=registry)
        self.event_loop_lag_seconds = Histogram(
            "tailrace_event_loop_lag_seconds",
            "How late the event loop woke a task that slept.",
            buckets=_LAG,
            registry=registry,
        )
        self.spans_total = Counter(
            "tailrace_spans_total",
            "Spans that were sent, or lost because they could not be. Both 0 without tracing.",
            ["outcome"],
            registry=registry,
        )
        _each(self.spans_total, SPAN_OUTCOMES)
        self.hop_silence_seconds = Gauge(
            "tailrace_hop_silence_seconds",
            "Since the last message of the most silent stream that is read here, by what it carries.",
            ["hop"],
            registry=registry,
        )
        self.hop_lag_seconds = Gauge(
            "tailrace_hop_lag_seconds",
            "How much older than usual the news in a stream's last message was; of the one read here that lags most.",
            ["hop"],
            registry=registry,
        )
        self.hops_down = Gauge(
            "tailrace_hops_down", "Streams that should be read here and are not up.", ["hop"], registry=registry
        )

    def set_phase(self, current: Phase) -> None:
        """1 for this phase, 0 for the others."""
        for phase in Phase:
            self.phase.labels(phase.value).set(phase is current)


class GatewayMetrics:
    """The front door: callers and what is written to them."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tailrace_gateway_"
        self.requests_total = Counter(
            name + "requests_total",
            "Requests that ended: completed, refused before acceptance, cancelled by the caller, or failed after it.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.open_streams = Gauge(
            name + "open_streams", "Answers being written to callers.", ["transport"], registry=registry
        )
        self.output_tokens_total = Counter(
            name + "output_tokens_total", "Tokens written to callers.", ["transport"], registry=registry
        )
        self.write_batches_total = Counter(
            name + "write_batches_total",
            "Writes to callers' transports, each of one or more deltas.",
            ["transport"],
            registry=registry,
        )
        self.resumes_total = Counter(
            name + "resumes_total",
            "Callers who came back: their answers taken up again, or refused.",
            ["transport", "outcome"],
            registry=registry,
        )
        self.open_stranded_streams = Gauge(
            name + "open_stranded_streams", "Answers whose tokenizer is lost and that wait for one.", registry=registry
        )
        self.stranded_total = Counter(
            name + "stranded_total",
            "Answers whose tokenizer was lost: taken up again, cut for want of one, or left by their caller meanwhile.",
            ["outcome"],
            registry=registry,
        )
        self.duplicates_dropped_total = Counter(
            name + "duplicates_dropped_total",
            "Tokens received again, compared, found equal and dropped.",
            registry=registry,
        )
        self.integrity_errors_total = Counter(
            name + "integrity_errors_total",
            "Answers ended because what was received twice differed, or did not fit.",
            registry=registry,
        )
        self.unread_tokens = Gauge(
            name + "unread_tokens", "Tokens that are here and were not taken for their callers yet.", registry=registry
        )
        self.unread_seconds = Gauge(name + "unread_seconds", UNREAD_SECONDS, registry=registry)
        self.oldest_request_age_seconds = Gauge(
            name + "oldest_request_age_seconds", "Age of the oldest answer that is being written.", registry=registry
        )
        self.slow_readers_total = Counter(
            name + "slow_readers_total", "Callers that were ended because they took nothing.", registry=registry
        )
        _each(self.requests_total, TRANSPORTS, OUTCOMES)
        _each(self.resumes_total, TRANSPORTS, RESUME_OUTCOMES)
        _each(self.stranded_total, STRANDED_OUTCOMES)
        for metric in (self.open_streams, self.output_tokens_total, self.write_batches_total):
            _each(metric, TRANSPORTS)


class TokenizerMetrics:
    """The ledger and the path of every answer; accepted_total is requests_total, let_go_total and what is open."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tailrace_tokenizer_"

        def counter(metric: str, says: str, *labels: str) -> Counter:
            return Counter(name + metric, says, labels, registry=registry)

        def gauge(metric: str, says: str, *labels: str) -> Gauge:
            return Gauge(name + metric, says, labels, registry=registry)

        def histogram(metric: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name + metric, says, buckets=buckets, registry=registry)

        self.accepted_total = counter("accepted_total", "Requests entered in the ledger.")
        self.requests_total = counter("requests_total", "Requests that ended, by finish reason.", "reason")
        self.claimed_total = counter("claimed_total", "Requests taken over from another tokenizer.")
        self.let_go_total = counter(
            "let_go_total",
            "Requests cut here before their end: claimed by another tokenizer, left to one, or lost while taken over.",
            "cut",
        )
        self.open_requests = gauge("open_requests", "Requests in the ledger, by the caller's phase.", "phase")
        self.open_attempts = gauge("open_attempts", "Attempts in the ledger, by the engine's phase.", "phase")
        self.retained_answers = gauge("retained_answers", "Finished answers that are kept for a caller to read.")
        self.retention_reserved_bytes = gauge(
            "retention_reserved_bytes", "Most memory that answers of detached and retained requests may come to take."
        )
        self.prompt_tokens_total = counter("prompt_tokens_total", "Tokens of accepted prompts.")
        self.output_tokens_total = counter("output_tokens_total", "Tokens that arrived for open requests.")
        self.duplicates_dropped_total = counter(
            "duplicates_dropped_total", "Tokens received again, compared, found equal and dropped."
        )
        self.integrity_errors_total = counter(
            "integrity_errors_total", "Requests ended because what was received twice differed."
        )
        self.slow_readers_total = counter(
            "slow_readers_total", "Direct callers that were ended because they took nothing."
        )
        self.late_tokens_total = counter(
            "late_tokens_total", "Tokens that came for answers that were whole: wasted past a cancel or a stop."
        )
        self.unsent_tokens = gauge("unsent_tokens", "Tokens that are here and were not sent to their readers yet.")
        self.unread_seconds = gauge("unread_seconds", UNREAD_SECONDS)
        self.oldest_request_age_seconds = gauge("oldest_request_age_seconds", "Age of the oldest request.")
        self.failovers_total = counter("failovers_total", "Attempts that went on with a request whose scheduler died.")
        self.resumes_total = counter("resumes_total", "Times that a caller took its request up again.")
        self.routes_ready = gauge("routes_ready", "Routes over which tokens can come.")
        self.route_opens_total = counter("route_opens_total", "Routes opened or moved.")
        self.time_to_first_token_seconds = histogram(
            "time_to_first_token_seconds", "From acceptance to the first token.", _TO_FIRST_TOKEN
        )
        self.inter_token_latency_seconds = TokenHistogram(
            name + "inter_token_latency_seconds",
            "Between two deltas of one choice, per token.",
            buckets=_BETWEEN_TOKENS,
            registry=registry,
        )
        self.time_per_output_token_seconds = histogram(
            "time_per_output_token_seconds",
            "Of a request's first choice: from its first token to its end, by the tokens after the first.",
            _BETWEEN_TOKENS,
        )
        self.acceptance_seconds = histogram(
            "acceptance_seconds", "From a request's entry in the ledger to a scheduler's acceptance.", _RELEASE
        )
        self.end_to_end_seconds = histogram("end_to_end_seconds", "From acceptance to the end.", _END_TO_END)
        self.finish_to_release_seconds = histogram(
            "finish_to_release_seconds", "From the caller's end to nothing being remembered.", _RELEASE
        )
        _each(self.requests_total, FINISH_REASONS)
        _each(self.let_go_total, LET_GO)
        _each(self.open_requests, CALLER_PHASES)
        _each(self.open_attempts, ENGINE_PHASES)


class DetokenizerMetrics:
    """The pipe from ids to text."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tailrace_detokenizer_"
        self.open_routes = Gauge(name + "open_routes", "Calls being served.", registry=registry)
        self.open_sequences = Gauge(name + "open_sequences", "Sequences with state here.", registry=registry)
        self.output_tokens_total = Counter(name + "output_tokens_total", "Tokens turned into text.", registry=registry)
        self.stop_matches_total = Counter(
            name + "stop_matches_total", "Sequences ended by a stop string.", registry=registry
        )
        self.wasted_tokens_total = Counter(
            name + "wasted_tokens_total",
            "Tokens that came after a stop text had ended their output.",
            registry=registry,
        )
        self.held_tokens = Gauge(
            name + "held_tokens", "Tokens that wait for text that is held back to leave.", registry=registry
        )


class SchedulerMetrics:
    """Queue, batches and KV memory; accepted_total is the sum of ended_total and what waits or runs."""

    def __init__(self, registry: CollectorRegistry) -> None:
        name = "tailrace_scheduler_"

        def counter(metric: str, says: str, *labels: str) -> Counter:
            return Counter(name + metric, says, labels, registry=registry)

        def gauge(metric: str, says: str) -> Gauge:
            return Gauge(name + metric, says, registry=registry)

        self.waiting = gauge("waiting", "Sequences in the queue.")
        self.running = gauge("running", "Sequences in the batch.")
        self.blocks_free = gauge("blocks_free", "KV blocks that hold nothing.")
        self.blocks_cached = gauge("blocks_cached", "KV blocks that only the prefix cache holds.")
        self.blocks_capacity = gauge("blocks_capacity", "All KV blocks.")
        self.log_sequences = gauge("log_sequences", "Sequences whose ids are kept for replay.")
        self.unsent_tokens = gauge("unsent_tokens", "Tokens that are here and were not sent to their routes yet.")
        self.oldest_attempt_age_seconds = gauge("oldest_attempt_age_seconds", "Age of the oldest attempt.")
        self.running_step_seconds = gauge("running_step_seconds", "How long the running step has been running.")
        self.tombstones = gauge("tombstones", "Attempts that a late Submit would be refused for.")
        self.accepted_total = counter("accepted_total", "Sequences accepted.")
        self.refused_total = counter("refused_total", "Submits refused, by the error's reason.", "reason")
        self.ended_total = counter("ended_total", "Sequences that ended, by finish reason.", "reason")
        self.prompt_tokens_total = counter("prompt_tokens_total", "Prompt tokens computed or reused.")
        self.cached_tokens_total = counter("cached_tokens_total", "Prompt tokens that the prefix cache had.")
        self.preemptions_total = counter("preemptions_total", "Times that a running sequence gave its blocks back.")
        self.output_tokens_total = counter("output_tokens_total", "Tokens generated.")
        self.drafted_tokens_total = counter("drafted_tokens_total", "Ids that were guessed, and computed with others.")
        self.accepted_tokens_total = counter("accepted_tokens_total", "Tokens generated by right guesses.")
        self.merged_tokens_total = counter(
            "merged_tokens_total",
            "Tokens that shared a row with an earlier one: their reader was slow, or a right guess brought them.",
        )
        self.replayed_sequences_total = counter(
            "replayed_sequences_total", "Sequences that a new call of their route was sent from token 0."
        )
        self.claims_total = counter("claims_total", "Requests given to another tokenizer than had them.")
        self.leases_expired_total = counter(
            "leases_expired_total", "Tokenizers of which nothing was heard for the grace; their attempts were released."
        )
        self.stale_owner_total = counter(
            "stale_owner_total", "Attempts that Submit, Abort, Release or Reconcile named and another tokenizer owns."
        )
        self.integrity_failures_total = counter("integrity_failures_total", "Failed checks of the block accounting.")
        self.step_seconds = Histogram(
            name + "step_seconds", "One forward pass with its sampling.", ["kind"], buckets=_STEP, registry=registry
        )
        self.batch_size = Histogram(name + "batch_size", "Sequences in a step.", buckets=_BATCH_SIZE, registry=registry)
        self.queue_seconds = Histogram(
            name + "queue_seconds", "From acceptance to the first step.", buckets=_IN_QUEUE, registry=registry
        )
        self.prefill_seconds = Histogram(
            name + "prefill_seconds", "From the first step to the first token.", buckets=_IN_QUEUE, registry=registry
        )
        self.decode_seconds = Histogram(
            name + "decode_seconds", "From the first token to the engine's end.", buckets=_END_TO_END, registry=registry
        )
        _each(self.ended_total, FINISH_REASONS)
        _each(self.step_seconds, STEP_KINDS)


def _each(metric: Counter | Gauge | Histogram, *values: Iterable[str]) -> None:
    """Makes the child of every combination of label values, so that each is there, at 0, from the start."""
    for combination in product(*values):
        metric.labels(*combination)
