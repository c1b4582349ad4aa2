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
from specdec.metrics.renamed import OLD_NAMES
from specdec.metrics.stats import EngineStats, GenerationStats
from specdec.serve.admission import AdmissionLimiter
from specdec.serve.process.messages import Beat
from specdec.serve.responses import State

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

# Field of EngineStats -> (name without its prefix, help). The names of drafting are vLLM's.
_COUNTED = {
    "prompt_tokens": ("prompt_tokens", "Prompt tokens."),
    "reused_prompt_tokens": ("reused_prompt_tokens", "Prompt tokens found in the prefix cache."),
    "generated_tokens": ("generated_tokens", "Generated tokens."),
    "passes": ("passes", "Forward passes of the target, each one read of the model."),
    "pass_seconds": ("pass_seconds", "Seconds of forward passes."),
    "batch_tokens": ("batch_tokens", "Tokens that forward passes computed, of all sequences."),
    "prefill_tokens": ("prefill_tokens", "Of these, tokens of prompts."),
    "sequence_passes": ("sequence_passes", "Decode passes, once for each sequence in the batch."),
    "drafted_tokens": ("spec_decode_num_draft_tokens", "Draft tokens verified."),
    "accepted_tokens": ("spec_decode_num_accepted_tokens", "Draft tokens accepted."),
    "queue_seconds": ("queue_seconds", "Seconds that sequences waited to be scheduled."),
    "preempted": ("preempted", "Preemptions: a sequence gave its KV up."),
    "swapped_in": ("swapped_in", "Preempted sequences whose KV was read back from a file."),
    "swapped_in_tokens": ("swapped_in_tokens", "Tokens whose KV these files held."),
    "saved_prefixes": ("saved_prefixes", "Prefixes written to the prompt cache folder."),
    "loaded_prefixes": ("loaded_prefixes", "Prompts whose KV was read from that folder."),
    "loaded_prefix_tokens": ("loaded_prefix_tokens", "Tokens whose KV these files held."),
    "recomputed_tokens": ("recomputed_tokens", "Tokens of preempted sequences computed again."),
    "bytes_streamed": ("streamed_bytes", "Bytes of weights read from storage."),
    "bytes_copied_to_device": ("copied_bytes", "Bytes of weights copied to a GPU."),
    "stall_seconds": ("stall_seconds", "Seconds that forward passes waited for storage."),
}
_NOW = {
    "sequences_running": ("sequences_running", "Sequences that have KV."),
    "sequences_waiting": ("sequences_waiting", "Sequences that wait, preempted ones included."),
    "kv_bytes": ("kv_bytes", "Bytes allocated for KV caches."),
    "kv_used_bytes": ("kv_used_bytes", "Of these, bytes in use, the prefix cache included."),
    "kv_shared_bytes": ("kv_shared_bytes", "Bytes that sharing KV between sequences saves."),
    "state_bytes": ("state_bytes", "Bytes of recurrent layers' states, cached ones included."),
    "pinned_bytes": ("pinned_bytes", "Bytes of streamed layers pinned in unused memory."),
    "memory_budget_bytes": ("memory_budget_bytes", "Memory budget of the process in bytes."),
}


def _old_name(field: str) -> str:
    return f"specdec_{OLD_NAMES[field]}"


def _old_help(field: str) -> str:
    return f"Deprecated: specdec_{field}."


class _EngineCollector(Collector):
    """The engine's statistics, read at each scrape."""

    def __init__(self, ask: Callable[[], Beat | None]) -> None:
        self._ask = ask

    def collect(self) -> Iterator[Metric]:
        beat = self._ask()
        stats = EngineStats() if beat is None else beat.stats
        for field, (name, help) in _COUNTED.items():
            yield CounterMetricFamily(f"specdec_{name}", help, getattr(stats, field))
        for field, (name, help) in _NOW.items():
            yield GaugeMetricFamily(f"specdec_{name}", help, getattr(stats, field))
        for field in _COUNTED.keys() & OLD_NAMES.keys():
            yield CounterMetricFamily(_old_name(field), _old_help(field), getattr(stats, field))
        for field in _NOW.keys() & OLD_NAMES.keys():
            yield GaugeMetricFamily(_old_name(field), _old_help(field), getattr(stats, field))
        by_depth = CounterMetricFamily(
            "specdec_spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a draft token of this depth.",
            labels=["position"],
        )
        for depth, n_accepted in enumerate(stats.accepted_by_depth):
            by_depth.add_metric([str(depth)], n_accepted)
        yield by_depth


def _resident_bytes(beat: Beat | None) -> int:
    return 0 if beat is None else beat.resident_bytes


class Metrics:
    """All metrics of a server.

    Args:
        ask: returns the engine's last sign of life, with its statistics; None without an engine.
    """

    def __init__(self, limiter: AdmissionLimiter, ask: Callable[[], Beat | None]) -> None:
        disable_created_metrics()  # when each counter began is known: with the server
        self._limiter = limiter
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(ask))
        self.engine_restarts = Counter(
            "specdec_engine_restarts",
            "Times that the engine's process ended and was started again.",
            registry=registry,
        )
        self._first_token = Histogram(
            "specdec_time_to_first_token_seconds",
            "Seconds to the first token, queueing included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._request_seconds = Histogram(
            "specdec_request_seconds",
            "Seconds from a request to the end of its answer, queueing included.",
            buckets=_SECONDS,
            registry=registry,
        )
        self._requests = Counter(
            "specdec_requests", "Requests answered.", ["path", "status"], registry=registry
        )
        inside = Gauge("specdec_requests_inside", "Requests that run or wait.", registry=registry)
        inside.set_function(lambda: limiter.num_requests)
        memory = Gauge(
            "specdec_resident_bytes", "Memory of the engine and the server.", registry=registry
        )
        memory.set_function(lambda: process_memory().rss_bytes + _resident_bytes(ask()))
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
