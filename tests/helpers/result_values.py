"""Made-up results of every kind of measurement, as their files hold them."""

from __future__ import annotations

from typing import Any

from bench.results import aggregate_stats
from offload.units import GIB
from specdec.metrics.stats import GenerationStats

PROVENANCE = {"git_revision": "abc", "argv": ["specdec-bench", "<x>"], "date": "today"}


def stats(seconds: float, passes: int) -> dict[str, Any]:
    item = GenerationStats(
        generated_tokens=41,
        passes=passes,
        accepted_tokens=40 - passes,
        decode_seconds=seconds,
        tried_by_depth=(10, 8, 2),
        accepted_by_depth=(8, 4, 0),
    )
    return aggregate_stats([{"stats": item.to_dict()}])


def peer_row(name: str, speed: float | None, **more: Any) -> dict[str, Any]:
    return {
        "peer": name, "weights": "hf", "exit": "ok", "reason": None, "tokens_per_second": speed,
        "time_to_first_token": speed, "seconds_per_token_median": speed,
        "seconds_per_token_p90": speed, "bytes_read_per_token": None,
        "mean_acceptance_length": None, "peak_anonymous_bytes": GIB, "cgroup_peak_bytes": None,
        "load_seconds": speed, "n_prompts": 2, "n_tokens": 20, "by_category": {},
        "acceptance_by_depth": None, **more,
    }  # fmt: skip


def comparison() -> dict[str, Any]:
    depth = [{"tried": 9, "accepted": 6}, {"tried": 6, "accepted": 3}]
    results = {"tokens_per_second": 1.0, "mean_acceptance_length": 2.0}
    return {
        "peers": [
            peer_row("accelerate", 0.25),
            peer_row("airllm", None, exit="not-run", reason="not installed: <airllm>"),
            peer_row("llama.cpp", None, exit="oom-killed", reason="killed", n_prompts=0),
            peer_row("specdec", 9.3, mean_acceptance_length=11.9, acceptance_by_depth=depth,
                     by_category={"writing": results}),
        ],
        "ratios": {"specdec": {"accelerate": {"ratio": 37.2, "n_prompts": 2, "n_tokens": 14}},
                   "accelerate": {"specdec": {"ratio": 0.0269, "n_prompts": 2}}},
        "weights": [{"model": "/m/grown-6gb", "draft": None, "n_bytes": GIB, "types": {}}],
        "memory_budget_bytes": GIB, "enforced": True, "storage_mbps": 500.0,
        "n_prompts": 2, "max_tokens": 10, "provenance": PROVENANCE,
    }  # fmt: skip


def speedup() -> dict[str, Any]:
    return {
        "plain": stats(40.0, 40), "speculative": stats(4.0, 10), "speedup": 10.0,
        "records": [], "peer": None, "model": "/m/grown", "memory_budget_bytes": 2 * GIB,
        "bytes_per_pass": 10**9, "storage_bytes_per_second": 2e9, "prompts_equal": 3,
        "n_prompts": 4, "provenance": PROVENANCE,
    }  # fmt: skip


def sweep_line(budget: int, mbps: float | None, tree: int | None, speed: float | None) -> Any:
    return {
        "setting": {"memory_budget_bytes": budget, "storage_mbps": mbps, "num_draft_tokens": tree},
        "key": "k", "exit": "ok" if speed else "oom-killed", "reason": None if speed else "killed",
        "tokens_per_second": speed, "predicted_tokens_per_second": speed,
        "mean_acceptance_length": None if tree == 0 else 3.0, "bytes_per_pass": 10**9,
        "storage_bytes_per_second": 2e9, "peak_anonymous_bytes": GIB, "n_prompts": 1,
        "n_tokens": 9, "provenance": PROVENANCE,
        "acceptance_by_depth": None if tree == 0 else [{"tried": 6, "accepted": 5}],
    }  # fmt: skip


def curve() -> dict[str, Any]:
    points = [
        {
            "rate": rate, "n_draft_tokens": n, "accuracy": rate, "tokens_per_pass": 2.0,
            "expected_tokens_per_pass": 2.1, "standard_error": 0.1, "tokens_per_second": 3.0,
            "speedup": 1.9 + rate, "predicted_speedup": 2.0 + rate, "pass_seconds": 1.0 + n * rate,
            "plain_pass_seconds": 1.0, "efficiency": 0.97, "passes": 30,
        }
        for rate in (0.5, 0.9)
        for n in (2, 8)
    ]  # fmt: skip
    return {
        "points": points,
        "best": [{"rate": 0.5, "n_draft_tokens": 2, "speedup": 2.4}],
        "differences": [], "num_seqs": 6, "records": [], "model": "/m/grown",
        "memory_budget_bytes": GIB, "n_prompts": 1, "max_tokens": 9, "provenance": PROVENANCE,
    }  # fmt: skip


def policy() -> dict[str, Any]:
    row = {"mean_acceptance_length": 3.0, "mean_tree_nodes": 16.0, "draft_share": 0.05}
    return {
        "rows": [
            {**row, "mode": "16x8", "tokens_per_second": 2.0, "is_lossless": True},
            {**row, "mode": "auto", "tokens_per_second": 1.9, "is_lossless": False},
        ],
        "best_fixed": "16x8", "auto_versus_best_fixed": 0.95, "auto_versus_plain": None,
        "model": "/m/grown", "plan": {"memory_budget_bytes": GIB}, "records": [],
        "provenance": PROVENANCE,
    }  # fmt: skip


def predicted_line() -> dict[str, Any]:
    results = {"pass_seconds": 1.25, "tokens_per_second": 0.8}
    error = {"pass_seconds": -0.04, "tokens_per_second": 0.05}
    actual = {"num_tokens": 17, "predicted": results, "measured": results, "error": error}
    return {**sweep_line(GIB, 800.0, 16, 0.8), "prediction": actual}


PICTURE = b"\x89PNG\r\n\x1a\n and so on"
