"""Sweep over budgets x storage speeds x tree sizes, each in a fresh process; it can be resumed.

Every setting is one line of a JSON Lines file, written when it is finished:

    setting     memory_budget_bytes, storage_mbps (null: as fast as it is), num_draft_tokens
                (null: auto; 0: plain decoding)
    key         hash of the setting, the models, the prompts and the tokens, for resuming
    exit, reason, tokens_per_second, time_to_first_token, seconds_per_token_median,
    seconds_per_token_p90, bytes_read_per_token, mean_acceptance_length, n_prompts, n_tokens,
    acceptance_by_depth, peak_anonymous_bytes, cgroup_peak_bytes, peak_rss_bytes,
    storage_bytes_per_second (probed), records
                as in bench.peers.compare
    num_seqs, n_equal_outputs, first_mismatch
                comparison with the first setting's outputs, or with an earlier report's, over
                their common length
    is_lossless, is_exact, sampling
                is_exact: outputs of one run must be equal (bench.checks.equal_outputs)
    prediction, storage_bytes_per_second_after
                with --prediction: see bench.peers.prediction
    bytes_per_pass, predicted_tokens_per_second, smallest_budget_bytes     of specdec's own plan
    auto_budgets                budgets that --budgets auto chose, and the key of their plan; null
                                if they were given
    model, draft_model, max_tokens, provenance
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.checks.equal_outputs import are_exact
from bench.peers.registry import PEERS, Weights
from bench.peers.runs import ProcessRun, ProgramRunner, RunSettings
from bench.process.results import (
    SPEEDUP,
    SWEEP,
    NoResults,
    ResultsError,
    append_line,
    read_results,
)
from bench.prompts.workloads import Prompt
from bench.results import first_mismatch, of_mode, summarise
from specdec.models.weight_files import weight_files
from specdec.planning.run_plan import RunPlan

N_AUTO_BUDGETS = 6
_LINE_START = b'{"setting": '  # start of every line of `measure_setting`


@dataclass(frozen=True)
class Setting:
    """Point of the sweep."""

    memory_budget_bytes: int
    storage_mbps: float | None
    num_draft_tokens: int | None
    """Number of draft tokens: None is auto, 0 plain decoding."""


@dataclass(frozen=True)
class Sweep:
    """Settings shared by all points."""

    weights: Weights
    prompts: tuple[Prompt, ...]
    base: RunSettings
    """Base settings; budget, storage and tree are replaced by each setting's."""
    auto_budgets: tuple[int, ...] = ()
    """Budgets that --budgets auto chose; empty if budgets were given."""
    reference: Mapping[str, Sequence[int]] | None = None
    """Reference tokens by prompt; None: those of the first setting."""


def all_settings(
    budgets: Sequence[int], speeds: Sequence[float | None], trees: Sequence[int | None]
) -> list[Setting]:
    """Return every combination; the fastest storage and the largest budgets first."""
    fastest_first = sorted(speeds, key=lambda speed: -float("inf") if speed is None else -speed)
    return [
        Setting(budget, speed, tree)
        for speed in fastest_first
        for budget in sorted(budgets, reverse=True)
        for tree in trees
    ]


def auto_budgets(plan: Callable[[int | str], RunPlan], n: int = N_AUTO_BUDGETS) -> list[int]:
    """Return budgets from the smallest that works to one without streaming, in equal steps.

    `plan` gives the plan of a budget in bytes, or of "auto".
    """
    smallest = plan("auto").smallest_budget_bytes
    # A little more, for the process that measures has other overheads than this one.
    largest = whole_budget(plan, smallest) * 103 // 100
    return [smallest + (largest - smallest) * i // (n - 1) for i in range(n)]


def recorded_budgets(path: Path, sweep: Sweep) -> list[int]:
    """Return the budgets that --budgets auto chose when the file was begun; empty if none.

    New ones would differ by a few bytes of measured memory and time, and every setting would look
    new.
    """
    key = _plan_key(sweep)
    for line in _finished_lines(path):
        recorded = line.get("auto_budgets")
        if recorded and recorded["key"] == key:
            return [int(n_bytes) for n_bytes in recorded["bytes"]]
    return []


def whole_budget(plan: Callable[[int | str], RunPlan], smallest: int) -> int:
    """Return the smallest budget, within 1 %, in which all of the model stays in memory."""
    low, high = smallest, smallest
    while (placement := plan(high).placement).n_streamed_layers:
        low, high = high, high + max(placement.streamed_bytes, high // 100)
    while high - low > high // 100:
        middle = (low + high) // 2
        if plan(middle).placement.n_streamed_layers:
            low = middle
        else:
            high = middle
    return high


def _finished_lines(path: Path) -> list[dict[str, Any]]:
    """Return the lines of the settings that a file has; a killed process is a result too."""
    if not path.exists() or not path.stat().st_size:
        return []
    try:
        results = read_results(path)
    except NoResults:
        raise ResultsError(f"{path} holds no results of a sweep: name another file") from None
    if results.kind != SWEEP:
        raise ResultsError(f"{path} holds results of {results.kind}: name another file")
    lines: list[dict[str, Any]] = results.value["settings"]
    return lines


def prepare_file(path: Path) -> None:
    """Make a file ready for further lines; raise ResultsError if it holds something else."""
    drop_torn_line(path)
    _finished_lines(path)


def drop_torn_line(path: Path) -> None:
    """Cut off a last line that was not finished, so that the next one starts on its own.

    Raises ResultsError, and leaves the file alone, if that line is not of a sweep.
    """
    if not path.exists():
        return
    if not path.is_file():
        raise ResultsError(f"{path} is not a regular file: a sweep is read again; name another")
    data = path.read_bytes()
    start = data.rfind(b"\n") + 1
    torn = data[start : start + len(_LINE_START)]
    if not _LINE_START.startswith(torn):
        raise ResultsError(f"{path} ends in a line that no sweep wrote: name another file")
    os.truncate(path, start)


def setting_key(sweep: Sweep, setting: Setting) -> str:
    """Return a hash of a measurement; models count by their files' names, sizes and times."""
    chosen = {"sampling": dict(sweep.base.sampling), "predict": sweep.base.predict}
    parts = {
        **_planned_parts(sweep),
        "setting": asdict(setting),
        "prompts": [[prompt.name, prompt.text] for prompt in sweep.prompts],
        "n_tokens": sweep.base.n_tokens,
        "enforce": sweep.base.enforce,
        **{name: value for name, value in chosen.items() if value},
    }
    return _digest(parts)


def _plan_key(sweep: Sweep) -> str:
    """Return a hash of everything that automatic budgets depend on."""
    return _digest(_planned_parts(sweep))


def _planned_parts(sweep: Sweep) -> dict[str, Any]:
    base, draft = sweep.base, sweep.weights.draft
    return {
        "model": fingerprint(sweep.weights.model),
        "draft": fingerprint(draft) if isinstance(draft, Path) else draft,
        "n_threads": base.n_threads,
        "n_ctx": base.n_ctx,
        "load": dict(base.load),
    }


def _digest(parts: Mapping[str, Any]) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(model: Path) -> list[list[Any]]:
    """Return name, size and modification time of each weight file."""
    stats = [(path, path.stat()) for path in weight_files(model)]
    return [[path.name, status.st_size, status.st_mtime_ns] for path, status in stats]


def run_sweep(
    sweep: Sweep, settings: Sequence[Setting], path: Path, provenance: Mapping[str, Any]
) -> Iterator[dict[str, Any] | None]:
    """Measure the settings that the file lacks and yield their lines; None for those that it has.

    Raises:
        ResultsError: the file holds something else.
    """
    drop_torn_line(path)
    lines = _finished_lines(path)
    done = {str(line["key"]) for line in lines}
    known = [outputs for line in lines if (outputs := outputs_of(line.get("records", ())))]
    reference = sweep.reference or (known[0] if known else None)
    chosen = {"key": _plan_key(sweep), "bytes": list(sweep.auto_budgets)}
    more = {"auto_budgets": chosen if sweep.auto_budgets else None, "provenance": dict(provenance)}
    for setting in settings:
        key = setting_key(sweep, setting)
        if key in done:
            yield None
            continue
        line = measure_setting(sweep, setting)
        outputs = outputs_of(line.get("records", ()))
        reference = reference or outputs or None
        line |= {**_equality(outputs, reference or {}), "key": key, **more}
        append_line(line, path)
        done.add(key)
        yield line


Outputs = Mapping[str, Sequence[int]]
"""Prompt -> token ids."""


def outputs_of(records: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return prompt -> token ids."""
    return {record["prompt"]: list(record["token_ids"]) for record in records}


def reference_outputs(path: Path) -> dict[str, list[int]]:
    """Return outputs of a `speedup` report or a sweep's first setting. Raises ResultsError."""
    results = read_results(path)
    if results.kind == SPEEDUP:
        records = of_mode(results.value["records"], "speculative")
    elif results.kind == SWEEP:
        records = results.value["settings"][0].get("records", ())
    else:
        raise ResultsError(f"{path} holds results of {results.kind}: give a report of speedup")
    return outputs_of(records)


def _equality(outputs: Outputs, reference: Outputs) -> dict[str, Any]:
    """Compare outputs over their common length, for a slow setting decodes fewer tokens."""
    shared = [name for name in outputs if name in reference]
    result = {
        name: first_mismatch(outputs[name][:n], reference[name][:n])
        for name in shared
        for n in [min(len(outputs[name]), len(reference[name]))]
    }
    mismatches = {name: at for name, at in result.items() if at is not None}
    return {
        "num_seqs": len(shared),
        "n_equal_outputs": len(shared) - len(mismatches),
        "first_mismatch": mismatches,
    }


def measure_setting(sweep: Sweep, setting: Setting) -> dict[str, Any]:
    """Measure a setting in one process of specdec."""
    settings = replace(
        sweep.base,
        memory_bytes=setting.memory_budget_bytes,
        storage_mbps=setting.storage_mbps,
        load={**sweep.base.load, "num_draft_tokens": setting.num_draft_tokens},
    )
    peer = PEERS["specdec-plain" if setting.num_draft_tokens == 0 else "specdec"]
    with closing(ProgramRunner(peer, sweep.weights, settings)) as runner:
        run = runner.run(sweep.prompts, settings.seconds)
    return {
        "setting": asdict(setting),
        **_values(run, peer.speculates),
        "model": str(sweep.weights.model),
        "draft_model": None if sweep.weights.draft is None else str(sweep.weights.draft),
        "max_tokens": settings.n_tokens,
        "sampling": dict(settings.sampling),
        "records": run.records,
        **run.notes,
    }


def _values(run: ProcessRun, speculates: bool) -> dict[str, Any]:
    plan = run.settings.get("plan", {})
    return {
        "exit": run.exit,
        "reason": run.reason,
        **summarise(run.records, speculates=speculates),
        "peak_anonymous_bytes": run.peak_anonymous_bytes,
        "cgroup_peak_bytes": run.cgroup_peak_bytes,
        "peak_rss_bytes": run.peak_rss_bytes,
        "is_lossless": all(
            record.get("stats", {}).get("is_lossless", True) for record in run.records
        ),
        "is_exact": are_exact(run.records),
        "storage_bytes_per_second": run.storage_bytes_per_second,
        "bytes_per_pass": plan.get("streamed_bytes_per_pass"),
        "predicted_tokens_per_second": plan.get("predicted_tokens_per_second"),
        "smallest_budget_bytes": plan.get("smallest_budget_bytes"),
    }
