"""Figures for Prometheus: of all generations since the start, and of this moment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    disable_created_metrics,
    generate_latest,
)

from offload.process.memory import process_memory
from specdec.decoding.stats import GenerationStats
from specdec.serve.gate import DRAINING, READY, STARTING, Gate

_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)

# Name without its prefix -> (help, what a generation adds). The names of drafting are vLLM's.
_COUNTED: dict[str, tuple[str, Callable[[GenerationStats], float]]] = {
    "prompt_tokens": ("Tokens of prompts.", lambda s: s.prompt_tokens),
    "reused_prompt_tokens": (
        "Tokens of prompts whose KV was there already.",
        lambda s: s.reused_prompt_tokens,
    ),
    "generated_tokens": ("Tokens of answers.", lambda s: s.generated_tokens),
    "passes": ("Decode passes of the target.", lambda s: s.passes),
    "spec_decode_num_draft_tokens": (
        "Draft tokens that passes have verified.",
        lambda s: s.drafted_tokens,
    ),
    "spec_decode_num_accepted_tokens": (
        "Draft tokens that were accepted.",
        lambda s: s.accepted_tokens,
    ),
    "streamed_bytes": ("Bytes of weights read from storage.", lambda s: s.bytes_streamed),
    "copied_bytes": ("Bytes of weights copied to a GPU.", lambda s: s.bytes_copied_to_device),
    "stall_seconds": ("Seconds that passes have waited for storage.", lambda s: s.stall_seconds),
    "decode_seconds": ("Seconds of decoding.", lambda s: s.decode_seconds),
}
_OF_THE_LAST: dict[str, tuple[str, Callable[[GenerationStats], float]]] = {
    "kv_bytes": ("Bytes allocated for KV caches.", lambda s: s.kv_bytes),
    "kv_used_ratio": ("Share of them in use after the last text.", lambda s: s.kv_used_fraction),
    "held_bytes": (
        "Bytes of layers held in memory that was unused.",
        lambda s: s.held_bytes,
    ),
    "memory_budget_bytes": ("Bytes that the process may use.", lambda s: s.memory_budget_bytes),
    "acceptance_ratio": (
        "Share of the last text's draft tokens that were accepted.",
        lambda s: s.acceptance_rate,
    ),
    "tokens_per_pass": ("Tokens per pass of the last text.", lambda s: s.mean_acceptance_length),
}


class Metrics:
    def __init__(self, gate: Gate) -> None:
        disable_created_metrics()  # when each counter began is known: with the server
        self._gate = gate
        self._registry = registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"specdec_{name}", help, registry=registry)
            for name, (help, _) in _COUNTED.items()
        }
        self._gauges = {
            name: Gauge(f"specdec_{name}", help, registry=registry)
            for name, (help, _) in _OF_THE_LAST.items()
        }
        self._by_depth = Counter(
            "specdec_spec_decode_num_accepted_tokens_per_pos",
            "Rounds in which a draft token of this depth was accepted.",
            ["position"],
            registry=registry,
        )
        self._first_token = Histogram(
            "specdec_time_to_first_token_seconds",
            "From the begin of a text to its first token; waiting for its turn excluded.",
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
        inside.set_function(lambda: gate.n_inside)
        memory = Gauge("specdec_resident_bytes", "Memory of the process.", registry=registry)
        memory.set_function(lambda: process_memory().rss_bytes)
        state = Gauge("specdec_state", "1 for the server's state.", ["state"], registry=registry)
        for name in (STARTING, READY, DRAINING):
            state.labels(name).set_function(partial(self._is_in, name))

    def _is_in(self, state: str) -> float:
        return float(self._gate.state == state)

    def add_text(self, stats: GenerationStats) -> None:
        """Count one prompt's texts, finished or not."""
        for name, (_, value) in _COUNTED.items():
            self._counters[name].inc(value(stats))
        for name, (_, value) in _OF_THE_LAST.items():
            self._gauges[name].set(value(stats))
        for depth, n_accepted in enumerate(stats.accepted_by_depth):
            self._by_depth.labels(str(depth)).inc(n_accepted)
        if stats.generated_tokens:
            self._first_token.observe(stats.time_to_first_token)

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """path: of a route, never what a client sent."""
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
