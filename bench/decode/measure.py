"""Plain and speculative decoding, or other modes, of one loaded model, prompt by prompt.

Runs as a process of its own, so that memory results and limits concern this measurement alone:

    python -m bench.decode.measure SPEC.json RESULT.json

Every prompt is decoded in every mode, each in turn the first, the storage probed in between. Each
record is also logged at once, so that an interrupted measurement keeps its records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from bench.checks.equal_outputs import are_exact
from bench.checks.near_ties import examine
from bench.decode.modes import PLAIN, SPECULATIVE, keywords_of
from bench.process.child import measure_for_parent, result_of_child
from bench.process.probe import BUFFER_BYTES, probe_bandwidth
from bench.process.results import Record, append_line
from bench.prompts.workloads import WARM_UP_TOKENS, Prompt
from offload.units import parse_bytes
from specdec.cli.progress import loading_progress, waiting
from specdec.metrics.stats import ratio
from specdec.models.weight_files import largest_weight_file
from specdec.policy.pair_statistics import PairStatistics

if TYPE_CHECKING:
    from specdec.api import LLM

MODES = (PLAIN, SPECULATIVE)
# Read-ahead goes on for a moment after a generation; a probe needs idle storage.
REST_SECONDS = 0.5


@dataclass(frozen=True)
class MeasureSpec:
    """Specification of a measurement; written as JSON for the process that does it."""

    load: dict[str, Any]
    """Keywords of `specdec.load`."""
    prompts: list[Prompt]
    sampling: dict[str, Any]
    """Keywords of `LLM.generate`."""
    log: str | None = None
    """JSON Lines file to which each record is appended."""
    adjust_seconds: float = REST_SECONDS
    modes: tuple[str, ...] = MODES
    """Names of `bench.decode.modes`."""
    probes: bool = True
    """Whether the storage and each prompt's prefill are measured too."""

    @classmethod
    def of(cls, values: dict[str, Any]) -> MeasureSpec:
        """Return the specification from JSON values."""
        prompts = [Prompt(**prompt) for prompt in values["prompts"]]
        return cls(**{**values, "prompts": prompts, "modes": tuple(values["modes"])})


def measure_in_child(spec: MeasureSpec, *, enforce: bool) -> dict[str, Any]:
    """Run `measure` in a process of its own, inside the memory budget if enforced.

    Raises typer.Exit with the child's exit code if the child has reported its error.
    """
    limit = spec.load["memory_budget"] if enforce else None
    return result_of_child("bench.decode.measure", spec, limit)


def measure(spec: MeasureSpec, out: TextIO) -> dict[str, Any]:
    """Run the whole specification; progress goes to `out`.

    Differences between outputs of an inexact target are examined (`near_ties`).
    """
    from specdec.api import load

    with loading_progress(f"loading {spec.load['model']}") as progress:
        llm = load(**_without_probe(spec), progress=progress)
    with llm:
        probe = Probe(Path(spec.load["model"]), spec.adjust_seconds) if spec.probes else None
        records = _measure_all(llm, spec, probe, out)
        is_exact = are_exact(asdict(record) for record in records)
        is_examined = not (is_exact or spec.sampling.get("temperature")) and spec.modes == MODES
        near_ties = _near_ties(llm, spec, records) if is_examined else []
        plan = llm.plan.to_dict()
    return {
        "records": [asdict(record) for record in records],
        "near_ties": near_ties,
        "plan": plan,
        "storage_probe": probe and probe.method,
    }


def _without_probe(spec: MeasureSpec) -> dict[str, Any]:
    """Return the load keywords with the probe's buffers, which are in this process, subtracted."""
    budget = spec.load.get("memory_budget", "auto")
    if budget == "auto" or not spec.probes:
        return spec.load
    return {**spec.load, "memory_budget": parse_bytes(budget) - BUFFER_BYTES}


def _measure_all(llm: LLM, spec: MeasureSpec, probe: Probe | None, out: TextIO) -> list[Record]:
    keywords = {mode: keywords_of(mode, llm.spec) for mode in spec.modes}
    plan, few = llm.plan, {**spec.sampling, "max_tokens": WARM_UP_TOKENS}
    with waiting("warming up"):
        for chosen in keywords.values():  # threads, caches and scratch memory, not the policy
            llm.generate(spec.prompts[0].text, **chosen, **few)
    costs = plan.cost_model, plan.draft_cost_model
    sizes = plan.n_draft_tokens, plan.tree_width
    statistics = {mode: PairStatistics(*costs, *sizes) for mode in keywords}
    records: list[Record] = []
    started = time.monotonic()
    for index, prompt in enumerate(spec.prompts):
        first = index % len(spec.modes)
        turn = []
        for mode in spec.modes[first:] + spec.modes[:first]:
            llm.session.use_statistics(statistics[mode])
            how = {**keywords[mode], **spec.sampling}
            with waiting(f"prompt {index + 1}/{len(spec.prompts)} ({prompt.name}): {mode}"):
                turn.append(_measure_one(llm, prompt, mode, how, probe))
            if spec.log is not None:
                append_line(asdict(turn[-1]), Path(spec.log))
        records += turn
        _report(out, turn, index + 1, len(spec.prompts), time.monotonic() - started)
    return records


def _near_ties(llm: LLM, spec: MeasureSpec, records: Sequence[Record]) -> list[dict[str, Any]]:
    """Return the near tie of every prompt whose two greedy decodings differ."""
    result = []
    for prompt in spec.prompts:
        plain, speculative = (
            next(r.token_ids for r in records if (r.prompt, r.mode) == (prompt.name, mode))
            for mode in MODES
        )
        tie = examine(llm.target, llm.tokenizer.encode(prompt.text), plain, speculative)
        if tie is not None:
            result.append({"prompt": prompt.name, **tie.to_dict()})
    return result


def _measure_one(
    llm: LLM, prompt: Prompt, mode: str, how: dict[str, Any], probe: Probe | None
) -> Record:
    before = probe.latest() if probe else 0.0
    # If prefill is measured too, the KV that another mode has cached must not be used.
    stream = llm.stream(prompt.text, cache_prompt=probe is None, **how)
    arrivals = []
    started = time.perf_counter()
    for chunk in stream:
        if chunk.token_ids:  # the last one may have text only
            arrivals.append((time.perf_counter() - started, len(chunk.token_ids)))
    result = stream.result
    after = probe.measure() if probe else 0.0
    return Record(
        prompt=prompt.name,
        mode=mode,
        token_ids=[int(token_id) for token_id in result.token_ids],
        finish_reason=result.finish_reason,
        stats=result.stats.to_dict(),
        storage_bytes_per_second=(before + after) / 2,
        text=result.text,
        pass_times=list(result.stats.pass_times),
        arrivals=arrivals,
    )


class Probe:
    """Probe of the raw bandwidth of the model's file; `method` says how it was read."""

    def __init__(self, model: Path, adjust_seconds: float) -> None:
        self._path = largest_weight_file(model)
        self._rest_seconds = adjust_seconds
        self._latest: float | None = None
        self.method = ""

    def measure(self) -> float:
        time.sleep(self._rest_seconds)
        bandwidth = probe_bandwidth(self._path)
        self._latest, self.method = bandwidth.bytes_per_second, bandwidth.method
        return self._latest

    def latest(self) -> float:
        """Return the result of the last probe, or of a first one."""
        return self.measure() if self._latest is None else self._latest


def _report(out: TextIO, runs: Sequence[Record], n_done: int, n_total: int, seconds: float) -> None:
    speed = {record.mode: record.stats["tokens_per_second"] for record in runs}
    results = [f"{mode} {speed[mode]:.2f} tok/s" for mode in sorted(speed)]
    if set(speed) == set(MODES):
        results.append(f"{ratio(speed['speculative'], speed['plain']):.2f}x")
    left = seconds / n_done * (n_total - n_done)
    print(
        f"prompt {n_done}/{n_total} ({runs[0].prompt}): {', '.join(results)} | {left:.0f} s left",
        file=out,
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(
        measure_for_parent(sys.argv[1:], lambda values: measure(MeasureSpec.of(values), sys.stderr))
    )
