"""Gain of the expert cache: speed and hit rate against the memory budget.

Every budget is a fresh process under that limit, which decodes plainly. Its accesses are replayed
with other eviction rules: least recently used, and Belady's, which is optimal.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.process.child import forget_model, measure_for_parent, result_of_child
from bench.process.probe import BLOCK_BYTES, probe_bandwidth
from bench.prompts.workloads import WARM_UP_TOKENS
from offload.experts.eviction import Access, belady, least_recently_used, replay, visits_of
from offload.experts.readers import N_READERS
from offload.storage.aligned import align_up
from offload.trace import READ, Event, recording
from specdec.metrics.stats import ratio
from specdec.models.weight_files import weight_files

if TYPE_CHECKING:
    from specdec.api import LLM

MAX_EVENTS = 4_000_000


@dataclass(frozen=True)
class HitsSpec:
    """Specification of one process's measurement. load: keywords of `specdec.load`."""

    load: dict[str, Any]
    prompts: list[str]
    max_tokens: int


def measure(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the results of one budget, of decoding without prefill.

    The first prompt fills the cache, and is not counted.
    """
    from specdec.api import load

    spec = HitsSpec(**values)
    with load(**spec.load) as llm:
        llm.generate(spec.prompts[0], max_tokens=WARM_UP_TOKENS)
        with recording(MAX_EVENTS) as trace:
            outputs = [_decode(llm, prompt, spec.max_tokens) for prompt in spec.prompts]
        plan = llm.plan.to_dict()
    if trace.n_dropped:
        raise RuntimeError(f"{trace.n_dropped} events were dropped: use fewer tokens")
    n_slots, n_experts = plan.get("n_expert_slots", 0), plan.get("n_experts", 0)
    reads = [e for e in trace.events if e.kind == READ and any(x.holds(e) for x in outputs[1:])]
    n_tokens, n_read = sum(len(x.token_ids) for x in outputs[1:]), sum(e.n_bytes for e in reads)
    seconds = sum(x.ended - x.began for x in outputs[1:])
    return {
        "n_slots": n_slots,
        "n_experts": n_experts,
        "share_held": ratio(n_slots, n_experts),
        "hit_rate": ratio(
            sum(x.num_found for x in outputs[1:]), sum(x.n_asked for x in outputs[1:])
        ),
        **rules(visits_of(trace), n_slots),
        "expected_bytes_per_token": plan.get("expected_expert_bytes_per_token"),
        "predicted_tokens_per_second": plan["plain_tokens_per_second"],
        "bytes_read": n_read,
        "bytes_per_token": ratio(n_read, n_tokens),
        "bytes_per_read": ratio(n_read, len(reads)),
        "stall_seconds": sum(x.stall_seconds for x in outputs[1:]),
        "seconds": seconds,
        "tokens_per_second": ratio(n_tokens, seconds),
        "peak_memory_bytes": outputs[-1].peak_memory_bytes,
        "token_ids": [x.token_ids for x in outputs[1:]],
    }


@dataclass(frozen=True)
class _Decoding:
    """Decoding of one prompt after its prefill; times by `time.perf_counter`."""

    began: float
    ended: float
    token_ids: list[int]
    n_asked: int
    num_found: int
    stall_seconds: float
    peak_memory_bytes: int

    def holds(self, event: Event) -> bool:
        return self.began <= event.started < self.ended


def _decode(llm: LLM, prompt: str, n_tokens: int) -> _Decoding:
    llm.generate(prompt, max_tokens=1, ignore_eos=True)
    began, before = time.perf_counter(), llm.target.transfer_stats
    result = llm.generate(prompt, max_tokens=n_tokens, ignore_eos=True)
    ended, after = time.perf_counter(), llm.target.transfer_stats
    return _Decoding(
        began,
        ended,
        list(result.token_ids),
        after.experts_asked - before.experts_asked,
        after.experts_found - before.experts_found,
        after.stall_seconds - before.stall_seconds,
        result.stats.peak_memory_bytes,
    )


def rules(visits: list[Access], n_slots: int) -> dict[str, float]:
    """Return hit rates by eviction rule, prefill and the first prompt included.

    Empty if all experts are in memory and there is no cache.
    """
    if not visits:
        return {}
    of_token = min(len(experts) for _, experts in visits)
    return {
        "own_rule": replay(visits, n_slots, limit=of_token),
        "least_recently_used": replay(visits, n_slots, least_recently_used, of_token),
        "belady": belady(visits, n_slots, of_token),
    }


def measure_budget(spec: HitsSpec, model: Path) -> dict[str, Any]:
    """Measure in a process of its own, after dropping the page cache; then probe the storage.

    read_share: seconds that the bytes need at the storage's speed, for reads of that size, over all
    seconds. 1 is a run that only reads, at full speed.
    """
    forget_model(model)
    result = result_of_child("bench.experts.hits", spec, spec.load["memory_budget"])
    largest = max(weight_files(model), key=lambda path: path.stat().st_size)
    block = align_up(round(result["bytes_per_read"])) or BLOCK_BYTES  # nothing was read
    speed = probe_bandwidth(largest, block_bytes=block, n_threads=N_READERS).bytes_per_second
    needed = result["bytes_read"] / speed
    return {
        **result,
        "memory_budget": spec.load["memory_budget"],
        "storage_bytes_per_second": speed,
        "read_share": ratio(needed, result["seconds"]),
        "stall_over_needed": ratio(result["stall_seconds"], needed),
    }


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], measure))
