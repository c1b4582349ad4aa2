"""Metrics for Prometheus: the engine's own, which are not counted again here, and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import get_args

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from offload.process.memory import process_memory
from specdec.metrics.stats import EngineStats, GenerationStats
from specdec.serve.admission import AdmissionLimiter
from specdec.serve.responses import State

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

# Field of EngineStats -> (name without its prefix, help). The names of drafting are vLLM's.
_COUNTED = {
    "prompt_tokens": ("prompt_tokens", "Tokens of prompts."),
    "reused_prompt_tokens": (
        "reused_prompt_tokens",
        "Tokens of prompts whose KV was there already.",
    ),
    "generated_tokens": ("generated_tokens", "Tokens of answers."),
    "passes": ("passes", "Passes of the target, each of them one read of the model."),
    "pass_seconds": ("pass_seconds", "Seconds inside of them."),
    "batch_tokens": ("batch_tokens", "Rows of them, of all sequences together."),
    "prefill_tokens": ("prefill_tokens", "Of these rows, those of prompts."),
    "sequence_passes": (
        "sequence_passes",
        "Decode passes, counted for each text that shared them.",
    ),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Draft tokens that passes have verified."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted."),
    "queue_seconds": ("queue_seconds", "Seconds that sequences have waited for their turn."),
    "preempted": ("preempted", "Times that a text gave its KV to others."),
    "restored": ("restored", "Times that such a text came back with its KV from a file."),
    "swapped_in_tokens": ("swapped_in_tokens", "Tokens whose KV these files brought."),
    "recomputed_tokens": (
        "recomputed_tokens",
        "Tokens computed anew when such sequences came back.",
    ),
    "bytes_streamed": ("streamed_bytes", "Bytes of weights read from storage."),
    "bytes_copied_to_device": ("copied_bytes", "Bytes of weights copied to a GPU."),
    "stall_seconds": ("stall_seconds", "Seconds that passes have waited for storage."),
}
_NOW = {
    "sequences_running": ("sequences_running", "Texts that have KV and are not over."),
    "sequences_waiting": (
        "sequences_waiting",
        "Texts that wait for their turn, or were set aside.",
    ),
    "kv_bytes": ("kv_bytes", "Bytes allocated for KV caches."),
    "kv_used_bytes": (
        "kv_used_bytes",
        "Of these, what sequences hold, those kept for others, too.",
    ),
    "kv_shared_bytes": (
        "kv_shared_bytes",
        "Bytes that sequences would need in addition if they shared none.",
    ),
    "pinned_bytes": ("pinned_bytes", "Bytes of layers held in memory that was unused."),
    "memory_budget_bytes": ("memory_budget_bytes", "Bytes that the process may use."),
}


class _EngineCollector(Collector):
    """The engine's own statistics, asked for at each scrape."""

    def __init__(self, ask: Callable[[], EngineStats]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        stats = self._ask()
        for field, (name, help) in _COUNTED.items():
            yield CounterMetricFamily(f"specdec_{name}", help, getattr(stats, field))
        for field, (name, help) in _NOW.items():
            yield GaugeMetricFamily(f"specdec_{name}", help, getattr(stats, field))
        by_depth = CounterMetricFamily(
            "specdec_spec_decode_num_accepted_tokens_per_pos",
            "Steps in which a draft token of this depth was accepted.",
            labels=["position"],
        )
        for depth, n_accepted in enumerate(stats.accepted_by_depth):
            by_depth.add_metric([str(depth)], n_accepted)
        yield by_depth


class Metrics:
    """Args:
    ask: for the figures of the models.
    """

    def __init__(self, limiter: AdmissionLimiter, ask: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # when each counter began is known: with the server
        self._limiter = limiter
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(ask))
        self._first_token = Histogram(
            "specdec_time_to_first_token_seconds",
            "From the begin of a text to its first token, waiting for its turn included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "specdec_request_seconds",
            "From a request to the end of its answer, waiting included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._requests = Counter(
            "specdec_requests", "Requests answered.", ["path", "status"], registry=registry
        )
        inside = Gauge("specdec_requests_inside", "Requests that run or wait.", registry=registry)
        inside.set_function(lambda: limiter.num_requests)
        memory = Gauge("specdec_resident_bytes", "Memory of the process.", registry=registry)
        memory.set_function(lambda: process_memory().rss_bytes)
        state = Gauge("specdec_state", "1 for the server's state.", ["state"], registry=registry)
        for name in get_args(State):
            state.labels(name).set_function(partial(self._is_in, name))

    def _is_in(self, state: str) -> float:
        return float(self._limiter.state == state)

    def add_sequence(self, stats: GenerationStats) -> None:
        """Count one prompt's sequences, finished or not."""
        if stats.generated_tokens:
            self._first_token.observe(stats.time_to_first_token)

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request. path: a route's, never what a client sent."""
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
