"""Plain streamed decoding against speculative decoding of the same target, and a peer.

This process only directs: every measurement is a fresh process, inside the same memory limit. The
peer runs half of its prompts before ours and half after, so that a drift of the storage's speed
falls on both.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import report
from bench.child import quiet_libraries
from bench.measure import MeasureSpec, measure_in_child
from bench.peers import Peer, PeerSettings, make_peer, summarise
from bench.provenance import collect
from bench.workloads import Prompt
from offload.units import parse_bytes
from specdec.division import DEFAULT_CTX_SIZE
from specdec.models import resolve_model
from specdec.stats import ratio


@dataclass(frozen=True)
class SpeedupRun:
    """What to compare."""

    load: dict[str, Any]
    """Keywords of `specdec.load`; "model" is a local directory."""
    prompts: list[Prompt]
    sampling: dict[str, Any]
    """Keywords of `LLM.generate`."""
    enforce: bool = False
    log: Path | None = None
    peer: str | None = None
    peer_prompts: int = 4
    peer_tokens: int = 8
    peer_cpu_memory: int | None = None


def run_speedup(run: SpeedupRun, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report; see `build_report` for the keys."""
    quiet_libraries()
    provenance = collect(argv, Path(run.load["model"]))
    peer = _make_peer(run)
    prompts = run.prompts[: run.peer_prompts]
    half = (len(prompts) + 1) // 2
    peer_runs = [peer.run(prompts[:half])] if peer is not None else []
    measured = _measure(run)
    if peer is not None and prompts[half:]:
        peer_runs.append(peer.run(prompts[half:]))
    result = build_report(run, measured)
    if peer is not None:
        result["peer"] = {"name": run.peer, **summarise(peer_runs), "trials": peer.trials}
        speed = result["peer"]["tokens_per_second"]
        result["plain_versus_peer"] = ratio(result["plain"]["tokens_per_second"], speed)
        result["peer"].update(report.compare_peer(measured["records"], result["peer"]["prompts"]))
    result["provenance"] = provenance
    return result


def build_report(run: SpeedupRun, measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of our own runs."""
    records = measured["records"]
    plain, speculative = (report.of_mode(records, mode) for mode in ("plain", "speculative"))
    stats = {"plain": report.aggregate_stats(plain)}
    stats["speculative"] = report.aggregate_stats(speculative)
    speeds = [stats[mode]["tokens_per_second"] for mode in ("speculative", "plain")]
    bytes_per_pass = int(measured["plan"]["streamed_bytes_per_pass"])
    return {
        **stats,
        "speedup": ratio(*speeds),
        "storage_roofline_fraction": report.roofline_fraction(plain, bytes_per_pass),
        **report.compare_tokens(plain, speculative),
        "near_ties": measured["near_ties"],
        "storage_bytes_per_second": report.mean_bandwidth(records),
        "storage_probe": measured["storage_probe"],
        "bytes_per_pass": bytes_per_pass,
        "model": run.load["model"],
        "draft_model": run.load.get("draft_model"),
        "memory_budget_bytes": _budget_bytes(run, measured),
        "enforced": run.enforce,
        "n_prompts": len(run.prompts),
        "sampling": run.sampling,
        "peer": None,
        "plan": measured["plan"],
        "records": records,
    }


def _budget_bytes(run: SpeedupRun, measured: dict[str, Any]) -> int:
    asked = run.load["memory_budget"]
    return int(measured["plan"]["memory_budget_bytes"] if asked == "auto" else parse_bytes(asked))


def _make_peer(run: SpeedupRun) -> Peer | None:
    if run.peer is None:
        return None
    draft = run.load.get("draft_model") if run.peer == "llama.cpp-draft" else None
    settings = PeerSettings(
        model=Path(run.load["model"]),
        budget_bytes=parse_bytes(run.load["memory_budget"]),
        n_tokens=run.peer_tokens,
        enforced=run.enforce,
        ignore_eos=bool(run.sampling.get("ignore_eos")),
        draft=None if draft is None else resolve_model(draft),
        cpu_memory_bytes=run.peer_cpu_memory,
        n_threads=run.load.get("threads"),
        n_ctx=run.load.get("ctx_size") or DEFAULT_CTX_SIZE,
    )
    return make_peer(run.peer, settings)


def _measure(run: SpeedupRun) -> dict[str, Any]:
    log = str(run.log.resolve()) if run.log else None
    spec = MeasureSpec(run.load, run.prompts, run.sampling, log)
    return measure_in_child(spec, enforce=run.enforce)


def write_report(result: dict[str, Any], path: Path | None) -> None:
    """JSON to a file, by way of a neighbour, so that no half report is left; or to stdout."""
    text = json.dumps(result, indent=1) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    partial = path.with_name(path.name + ".part")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)
