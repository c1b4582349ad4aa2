"""Metrics for Prometheus: the engine's own, which are not counted again here, and requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

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
from specdec.serve.responses import State
from specdec.serve.router.replicas import Replica
from specdec.serve.router.router import ModelRouter
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.states import REPLICA_STATES, ModelState

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
    "kv_bytes_read": ("kv_read_bytes", "Bytes of KV read from its file."),
    "kv_bytes_written": ("kv_written_bytes", "Bytes of KV written to its file."),
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
    """Statistics of the engines, read at each scrape; of several models those that are loaded."""

    def __init__(self, router: ModelRouter) -> None:
        self._router, self._labels = router, _EngineLabels(router)

    def collect(self) -> Iterator[Metric]:
        all_stats: dict[tuple[str, ...], EngineStats] = {}
        for runner in self._router.runners:
            beats = runner.replicas.beats
            for replica in runner.replicas:
                if replica.number in beats:
                    all_stats[self._labels.values(runner, replica)] = beats[replica.number].stats
                elif self._router.only is not None:
                    all_stats[self._labels.values(runner, replica)] = EngineStats()
        labels = self._labels.names
        for kind, name, help, field in _families():
            family = kind(name, help, labels=labels)
            for values, stats in all_stats.items():
                family.add_metric(list(values), getattr(stats, field))
            yield family
        by_depth = CounterMetricFamily(
            "specdec_spec_decode_num_accepted_tokens_per_pos",
            "Steps that accepted a draft token of this depth.",
            labels=[*labels, "position"],
        )
        for values, stats in all_stats.items():
            for depth, n_accepted in enumerate(stats.accepted_by_depth):
                by_depth.add_metric([*values, str(depth)], n_accepted)
        yield by_depth


def _families() -> Iterator[tuple[Any, str, str, str]]:
    """Yield (kind, name, help, field of EngineStats) of each family."""
    for fields, kind in ((_COUNTED, CounterMetricFamily), (_NOW, GaugeMetricFamily)):
        for field, (name, help) in fields.items():
            yield kind, f"specdec_{name}", help, field
    for fields, kind in ((_COUNTED, CounterMetricFamily), (_NOW, GaugeMetricFamily)):
        for field in fields.keys() & OLD_NAMES.keys():
            yield kind, _old_name(field), _old_help(field), field


class _EngineLabels:
    """Labels of an engine's metrics: its model's name where there are several models, the number of
    its replica where there are several engines of a model."""

    def __init__(self, router: ModelRouter) -> None:
        self._has_models = router.only is None
        self._has_replicas = any(len(runner.replicas) > 1 for runner in router.runners)

    @property
    def names(self) -> list[str]:
        return ["model"] * self._has_models + ["replica"] * self._has_replicas

    def values(self, runner: ModelRunner, replica: Replica) -> tuple[str, ...]:
        model, number = [runner.name], [str(replica.number)]
        return (*model * self._has_models, *number * self._has_replicas)


class _ModelCollector(Collector):
    """States and restarts of the models, and where their requests went."""

    def __init__(self, router: ModelRouter) -> None:
        self._router, self._labels = router, _EngineLabels(router)

    def collect(self) -> Iterator[Metric]:
        help = "Times that the engine's process ended and was started again."
        restarts = CounterMetricFamily("specdec_engine_restarts", help, labels=self._labels.names)
        states = GaugeMetricFamily(
            "specdec_model_state", "1 for the model's state.", labels=["model", "state"]
        )
        for runner in self._router.runners:
            for replica in runner.replicas:
                values = self._labels.values(runner, replica)
                restarts.add_metric(values, replica.num_restarts)
            for state in get_args(ModelState):
                states.add_metric([runner.name, state], float(runner.state == state))
        yield restarts
        yield states
        yield from self._of_replicas()

    def _of_replicas(self) -> Iterator[Metric]:
        runners = [runner for runner in self._router.runners if len(runner.replicas) > 1]
        if not runners:
            return
        help = "1 for the replica's state."
        states = GaugeMetricFamily(
            "specdec_replica_state", help, labels=[*self._labels.names, "state"]
        )
        help = "Requests by why a replica got them: it knew the prompt's prefix, or its load."
        routed = CounterMetricFamily("specdec_routed_requests", help, labels=["by"])
        for runner in runners:
            for replica in runner.replicas:
                values = self._labels.values(runner, replica)
                for state in REPLICA_STATES:
                    states.add_metric([*values, state], float(replica.state == state))
            routed.add_metric(["prefix"], runner.replicas.chooser.num_by_prefix)
            routed.add_metric(["load"], runner.replicas.chooser.num_by_load)
        yield states
        yield routed


def _resident_bytes(router: ModelRouter) -> int:
    beats = (beat for runner in router.runners for beat in runner.replicas.beats.values())
    return sum(beat.resident_bytes for beat in beats)


class Metrics:
    """All metrics of a server.

    Args:
        state: returns the server's state.
    """

    def __init__(
        self, limiter: AdmissionLimiter, router: ModelRouter, state: Callable[[], State]
    ) -> None:
        disable_created_metrics()  # when each counter began is known: with the server
        self._state, self._has_label = state, router.only is None
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(router))
        registry.register(_ModelCollector(router))
        self._first_token = Histogram(
            "specdec_time_to_first_token_seconds",
            "Seconds to the first token, queueing included.",
            ["model"] if self._has_label else [],
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
            "specdec_resident_bytes", "Memory of the engines and the server.", registry=registry
        )
        memory.set_function(lambda: process_memory().rss_bytes + _resident_bytes(router))
        states = Gauge("specdec_state", "1 for the server's state.", ["state"], registry=registry)
        for name in get_args(State):
            states.labels(name).set_function(partial(self._is_in, name))

    def _is_in(self, state: str) -> float:
        return float(self._state() == state)

    def add_sequence(self, runner: ModelRunner, stats: GenerationStats) -> None:
        """Count one prompt's sequences, finished or not."""
        if stats.generated_tokens:
            labels = {"model": runner.name} if self._has_label else {}
            seconds = self._first_token.labels(**labels) if labels else self._first_token
            seconds.observe(stats.time_to_first_token)

    def add_request(self, path: str, status: int, seconds: float) -> None:
        """Count a request. path: a route's, never what a client sent."""
        self._requests.labels(path, str(status)).inc()
        self._request_seconds.observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
