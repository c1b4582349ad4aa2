"""What a cache of experts is worth: speed and hit rate against the memory budget.

Every budget is a fresh process under that limit, which decodes plainly. What it asked for is
replayed with other rules than its own: the least recently used, and Belady's, which no rule beats.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.process.child import forget_model, measure_for_parent, result_of_child
from bench.process.probe import probe_bandwidth
from bench.prompts.workloads import WARM_UP_TOKENS
from offload.experts.cache import N_READERS
from offload.experts.eviction import belady, least_recently_used, replay, visits_of
from offload.storage.aligned import align_up
from offload.trace import READ, recording
from specdec.decoding.stats import ratio
from specdec.models.weight_files import weight_files

MAX_EVENTS = 4_000_000


@dataclass(frozen=True)
class HitsSpec:
    """What one process measures. load: keywords of `specdec.load`."""

    load: dict[str, Any]
    prompts: list[str]
    max_tokens: int


def measure(values: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one budget; hit rates count from the second prompt on, when the cache is full."""
    from specdec.api import load

    spec = HitsSpec(**values)
    with load(**spec.load) as llm:
        llm.generate(spec.prompts[0], max_tokens=WARM_UP_TOKENS)
        llm.generate(spec.prompts[0], max_tokens=spec.max_tokens, ignore_eos=True)
        with recording(MAX_EVENTS) as trace:
            began, before = time.perf_counter(), llm.target.stream_use
            results = [
                llm.generate(prompt, max_tokens=spec.max_tokens, ignore_eos=True)
                for prompt in spec.prompts[1:]
            ]
            seconds = time.perf_counter() - began
        use, plan = llm.target.stream_use, llm.plan.to_dict()
    if trace.n_dropped:
        raise RuntimeError(f"{trace.n_dropped} events are more than are kept: use fewer tokens")
    visits = visits_of(trace)
    n_slots, n_reads = plan.get("n_expert_slots", 0), sum(e.kind == READ for e in trace.events)
    stats = [one.stats for one in results]
    return {
        "n_slots": n_slots,
        "n_experts": plan.get("n_experts", 0),
        "share_held": ratio(n_slots, plan.get("n_experts", 0)),
        "hit_rate": ratio(
            use.experts_found - before.experts_found, use.experts_asked - before.experts_asked
        ),
        "own_rule": replay(visits, n_slots) if n_slots else None,
        "least_recently_used": replay(visits, n_slots, least_recently_used) if n_slots else None,
        "belady": belady(visits, n_slots) if n_slots else None,
        "expected_bytes_per_token": plan.get("expected_expert_bytes_per_token"),
        "bytes_read": use.bytes_streamed - before.bytes_streamed,
        "bytes_per_read": ratio(use.bytes_streamed - before.bytes_streamed, n_reads),
        "stall_seconds": use.stall_seconds - before.stall_seconds,
        "seconds": seconds,
        **_decoding(stats),
        "token_ids": [list(one.token_ids) for one in results],
    }


def _decoding(stats: list[Any]) -> dict[str, Any]:
    """Of tokens after the first of each prompt. Bytes of prompts' passes cannot be told apart, so
    a token's are those of generations divided by all their tokens."""
    n_tokens = sum(one.generated_tokens for one in stats)
    return {
        "tokens_per_second": ratio(n_tokens - len(stats), sum(one.decode_seconds for one in stats)),
        "bytes_per_token": ratio(sum(one.bytes_streamed for one in stats), n_tokens),
        "peak_memory_bytes": stats[-1].peak_memory_bytes,
    }


def measure_budget(spec: HitsSpec, model: Path) -> dict[str, Any]:
    """In a process of its own, the page cache dropped, between two probes of the storage.

    read_share: seconds that the bytes need at the storage's speed, for reads of that size, over all
    seconds. 1 would be a run that only reads, as fast as the storage can.
    """
    forget_model(model)
    found = result_of_child("bench.experts.hits", spec, spec.load["memory_budget"])
    largest = max(weight_files(model), key=lambda path: path.stat().st_size)
    block = align_up(max(1, round(found["bytes_per_read"])))
    speed = probe_bandwidth(largest, block_bytes=block, n_threads=N_READERS).bytes_per_second
    needed = found["bytes_read"] / speed
    return {
        **found,
        "memory_budget": spec.load["memory_budget"],
        "storage_bytes_per_second": speed,
        "read_share": ratio(needed, found["seconds"]),
        "stall_over_needed": ratio(found["stall_seconds"], needed),
    }


if __name__ == "__main__":
    sys.exit(measure_for_parent(sys.argv[1:], measure))
