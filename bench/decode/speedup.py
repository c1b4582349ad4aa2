"""Plain streamed decoding against speculative decoding of the same target, and a peer.

This process only directs: every measurement is a fresh process, inside the same memory limit. The
peer runs half of its prompts before ours and half after, so that a drift of the storage's speed
falls on both. It decodes fewer prompts and tokens than we do: `ratios` are over those of both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.decode.measure import MeasureSpec, measure_in_child
from bench.figures import (
    Record,
    aggregate_stats,
    compare_tokens,
    efficiency,
    mean_bandwidth,
    of_mode,
    pairwise_ratios,
    pass_times_of,
    roofline_fraction,
    summarise,
    typical_pass_seconds,
)
from bench.peers.registry import PEERS, Weights
from bench.peers.runs import ProcessRun, ProgramRunner, settings_for
from bench.process import limited
from bench.process.provenance import collect
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError
from offload.units import parse_bytes
from specdec.decoding.stats import ratio

# Its prompts and tokens are few and given: no other limit is wanted.
_PEER_SECONDS = 3600.0
_PEER = "peer"


class PeerError(SpecdecError):
    """The peer cannot run here."""


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
    """Measure and report; see `build_report` for the keys.

    Raises PeerError where the peer does not survive its limit.
    """
    provenance = collect(argv, Path(run.load["model"]))
    peer = _make_peer(run)
    prompts = run.prompts[: run.peer_prompts]
    half = (len(prompts) + 1) // 2
    peer_runs = [_run_peer(peer, prompts[:half])] if peer is not None else []
    measured = _measure(run)
    if peer is not None and prompts[half:]:
        peer_runs.append(_run_peer(peer, prompts[half:]))
    result = build_report(run, measured)
    if peer is not None:
        result["peer"] = _peer_column(peer, peer_runs, measured["records"])
        result["ratios"] = _ratios(measured["records"], result["peer"])
        peer.close()
    result["provenance"] = provenance
    return result


def _run_peer(peer: ProgramRunner, prompts: Sequence[Prompt]) -> ProcessRun:
    run = peer.run(prompts, _PEER_SECONDS)
    if run.exit != limited.OK:
        raise PeerError(
            f"{peer.peer.name}: {run.reason}; leave --peer out or give a larger --memory-budget"
        )
    return run


def _peer_column(
    peer: ProgramRunner, runs: Sequence[ProcessRun], ours: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """A column of the table, under the names that our own columns have."""
    records = [record for run in runs for record in run.records]
    figures = summarise(records, speculates=peer.peer.speculates)
    if figures["mean_acceptance_length"] is None:
        del figures["mean_acceptance_length"]
    return {
        "name": peer.peer.name,
        **figures,
        "time_per_output_token": ratio(1.0, figures["tokens_per_second"] or 0.0),
        "load_seconds": max(run.load_seconds or 0.0 for run in runs),
        "peak_memory_bytes": max(run.peak_rss_bytes or 0 for run in runs),
        "settings": runs[-1].settings,
        "trials": peer.trials,
        "prompts": records,
        "token_match": compare_tokens(records, of_mode(ours, "plain"))["token_match"],
    }


def _ratios(ours: Sequence[dict[str, Any]], peer: Mapping[str, Any]) -> dict[str, Any]:
    """Of plain and speculative decoding over the peer: the same tokens of the same prompts.

    See bench.figures.pairwise_ratios for the keys.
    """
    runs = {mode: of_mode(ours, mode) for mode in ("plain", "speculative")}
    found = pairwise_ratios({**runs, _PEER: peer["prompts"]})
    return {mode: found[mode][_PEER] for mode in runs if _PEER in found[mode]}


def build_report(run: SpeedupRun, measured: dict[str, Any]) -> dict[str, Any]:
    """The figures of our own runs."""
    records = measured["records"]
    plain, speculative = (of_mode(records, mode) for mode in ("plain", "speculative"))
    stats = {"plain": aggregate_stats(plain)}
    stats["speculative"] = aggregate_stats(speculative)
    speeds = [stats[mode]["tokens_per_second"] for mode in ("speculative", "plain")]
    speedup = ratio(*speeds)
    length = stats["speculative"]["mean_acceptance_length"]
    bytes_per_pass = int(measured["plan"]["streamed_bytes_per_pass"])
    return {
        **stats,
        "speedup": speedup,
        **_efficiency(speedup, length, plain, speculative),
        "storage_roofline_fraction": roofline_fraction(plain, bytes_per_pass),
        **compare_tokens(speculative, plain),
        "near_ties": measured["near_ties"],
        "storage_bytes_per_second": mean_bandwidth(records),
        "storage_probe": measured["storage_probe"],
        "bytes_per_pass": bytes_per_pass,
        "model": run.load["model"],
        "draft_model": run.load.get("draft_model"),
        "memory_budget_bytes": _budget_bytes(run, measured),
        "enforced": run.enforce,
        "n_prompts": len(run.prompts),
        "sampling": run.sampling,
        "peer": None,
        "ratios": {},
        "plan": measured["plan"],
        "records": records,
    }


def _efficiency(
    speedup: float,
    tokens_per_pass: float,
    plain: Sequence[Record],
    speculative: Sequence[Record],
) -> dict[str, float | None]:
    """T(1), T(N) and what of their promise arrives; N is what the trees came to."""
    seconds_1, seconds_n = (
        typical_pass_seconds(pass_times_of(records)) for records in (plain, speculative)
    )
    return {
        "plain_pass_seconds": seconds_1,
        "speculative_pass_seconds": seconds_n,
        "efficiency": efficiency(speedup, tokens_per_pass, seconds_1, seconds_n),
    }


def _budget_bytes(run: SpeedupRun, measured: dict[str, Any]) -> int:
    asked = run.load["memory_budget"]
    return int(measured["plan"]["memory_budget_bytes"] if asked == "auto" else parse_bytes(asked))


def _make_peer(run: SpeedupRun) -> ProgramRunner | None:
    if run.peer is None:
        return None
    weights = Weights.named(run.load["model"], run.load.get("draft_model"))
    settings = settings_for(
        run.load,
        memory_bytes=parse_bytes(run.load["memory_budget"]),
        n_tokens=run.peer_tokens,
        seconds=_PEER_SECONDS,
        enforce=run.enforce,
        ignore_eos=bool(run.sampling.get("ignore_eos")),
        cpu_memory_bytes=run.peer_cpu_memory,
    )
    return ProgramRunner(PEERS[run.peer], weights, settings)


def _measure(run: SpeedupRun) -> dict[str, Any]:
    log = str(run.log.resolve()) if run.log else None
    spec = MeasureSpec(run.load, run.prompts, run.sampling, log)
    return measure_in_child(spec, enforce=run.enforce)
