"""Comparison of programs on the same prompts, weights and limits, in turns.

Every program decodes the first half of its prompts and then, in reverse order, every one the second
half, so that a drift of the storage's speed affects all of them. A program that cannot run is a row
too.

The result (JSON; `null` if not applicable):

    peers           list of rows, in the requested order:
        peer, weights           name; "hf" or "gguf"
        exit, reason            "ok", "oom-killed", "timeout", "failed" or "not-run"; one line
        tokens_per_second, time_to_first_token, seconds_per_token_median, seconds_per_token_p90,
        bytes_read_per_token, mean_acceptance_length, n_prompts, n_tokens, acceptance_by_depth
                                see bench.results.summarise
        peak_anonymous_bytes, cgroup_peak_bytes, peak_rss_bytes, load_seconds
                                the largest of its processes
        token_match             share of tokens equal to specdec-plain's on the same weights
        is_exact                outputs must be specdec-plain's to the bit (checks/equal_outputs.py)
        by_category             category -> the results of `summarise`
        settings, trials        settings of the program; the ones that were tried for that
        rewrite_seconds         for converting the weights beforehand, if needed; else null
        processes               exit, seconds, memory and probed storage speed of each process
        prompts                 the records of bench.peers.program
    ratios          peer -> other -> {ratio, n_prompts, n_tokens}: speed over speed, on the tokens
                    that both decoded
    weights         for each format: model, draft, n_bytes, types (share of the bytes by type)
    memory_budget_bytes, enforced, storage_mbps, storage_bytes_per_second (probed, mean),
    n_prompts, n_prompts_too_long (left out of the file, as they do not fit the context),
    max_tokens, time_limit_seconds, n_threads, ctx_size, provenance
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from bench.checks.equal_outputs import are_exact
from bench.peers.registry import PEERS, Peer, Weights, why_not
from bench.peers.runs import ProcessRun, ProgramRunner, RunSettings
from bench.peers.weights import describe_weights
from bench.process.interpreters import Interpreter
from bench.process.provenance import collect
from bench.prompts.workloads import Prompt
from bench.results import by_category, compare_tokens, pairwise_ratios, summarise
from offload.process import limited

NOT_RUN = "not-run"
_REFERENCE = "specdec-plain"
_LARGEST = ("peak_anonymous_bytes", "cgroup_peak_bytes", "peak_rss_bytes", "load_seconds")


@dataclass
class Entry:
    """Row of the comparison: a program on weights of one format, and the runs of its processes."""

    peer: Peer
    weights: Weights | None
    problem: str | None = None
    """Reason why it is not run."""
    runner: ProgramRunner | None = None
    runs: list[ProcessRun] = field(default_factory=list)

    @property
    def records(self) -> list[dict[str, Any]]:
        return [record for run in self.runs for record in run.records]

    @property
    def is_over(self) -> bool:
        """Return whether no further process is started: it cannot run, or one has failed."""
        return self.problem is not None or any(run.exit != limited.OK for run in self.runs)

    def row(self) -> dict[str, Any]:
        last = self.runs[-1] if self.runs else None
        largest = {
            name: max(
                (v for run in self.runs if (v := getattr(run, name)) is not None), default=None
            )
            for name in _LARGEST
        }
        speculates = self.peer.speculates
        return {
            "peer": self.peer.name,
            "weights": None if self.weights is None else self.weights.format,
            "exit": NOT_RUN if last is None else last.exit,
            "reason": self.problem if last is None else last.reason,
            **summarise(self.records, speculates=speculates),
            **largest,
            "by_category": by_category(self.records, speculates=speculates),
            "is_exact": are_exact(self.records),
            "settings": last.settings if last is not None else {},
            "rewrite_seconds": None if self.runner is None else self.runner.rewrite_seconds,
            "trials": [] if self.runner is None else self.runner.trials,
            "processes": [run.results() for run in self.runs],
            "prompts": self.records,
        }


def compare(
    names: Sequence[str],
    weights: Sequence[Weights],
    prompts: Sequence[Prompt],
    settings: RunSettings,
    argv: Sequence[str],
    save: Callable[[dict[str, Any]], None] = lambda result: None,
    n_too_long: int = 0,
) -> dict[str, Any]:
    """Run the programs of these names; see the module's docstring for the keys.

    `save` is called with the result so far after every process, should the rest be interrupted.
    `n_too_long` prompts of the file were left out, as they do not fit the context.

    Raises:
        offload.process.cgroup.CgroupUnavailable: the limits cannot be set; nothing was measured.
    """
    shared = {
        "memory_budget_bytes": settings.memory_bytes,
        "enforced": settings.enforce,
        "storage_mbps": settings.storage_mbps,
        "n_prompts": len(prompts),
        "n_prompts_too_long": n_too_long,
        "max_tokens": settings.n_tokens,
        "time_limit_seconds": settings.seconds,
        "n_threads": settings.n_threads,
        "ctx_size": settings.n_ctx,
        "weights": [describe_weights(weight) for weight in weights],
        "provenance": {
            **collect(argv, weights[0].model),
            "interpreters": {
                name: interpreter.describe() for name, interpreter in settings.interpreters.items()
            },
        },
    }
    entries = list(make_entries(names, weights, settings.interpreters))
    half = (len(prompts) + 1) // 2
    with ExitStack() as stack:
        for entry in entries:
            if entry.problem is None and entry.weights is not None:
                entry.runner = ProgramRunner(entry.peer, entry.weights, settings)
                stack.callback(entry.runner.close)
        for part, order in ((prompts[:half], entries), (prompts[half:], entries[::-1])):
            for entry in order:
                if part and entry.runner is not None and not entry.is_over:
                    entry.runner.learn_from(other.runner for other in entries)
                    seconds = settings.seconds * len(part) / len(prompts)
                    entry.runs.append(entry.runner.run(part, seconds))
                    save(_result(entries, shared))
    return _result(entries, shared)


def _result(entries: Sequence[Entry], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result so far."""
    rows = [entry.row() for entry in entries]
    _match_tokens(rows)
    probes = [run.storage_bytes_per_second for entry in entries for run in entry.runs]
    return {
        "peers": rows,
        "ratios": pairwise_ratios({label(row, rows): row["prompts"] for row in rows}),
        "storage_bytes_per_second": sum(probes) / len(probes) if probes else None,
        **shared,
    }


def make_entries(
    names: Sequence[str],
    weights: Sequence[Weights],
    interpreters: Mapping[str, Interpreter],
) -> Iterator[Entry]:
    """Yield every program with every format of the weights that it reads; at least one row each."""
    for name in names:
        peer, interpreter = PEERS[name], interpreters.get(name)
        fitting = [weight for weight in weights if weight.format in peer.formats]
        for weight in fitting:
            yield Entry(peer, weight, why_not(peer, weight, interpreter))
        if not fitting:
            yield Entry(peer, None, why_not(peer, None, interpreter))


def label(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the program's name, with the format of its weights if it has several rows."""
    several = sum(other["peer"] == row["peer"] for other in rows) > 1
    return f"{row['peer']} ({row['weights']})" if several else str(row["peer"])


def _match_tokens(rows: Sequence[dict[str, Any]]) -> None:
    """Add the share of tokens equal to specdec-plain's on the same weights to each row."""
    for row in rows:
        references = [
            other["prompts"]
            for other in rows
            if other["peer"] == _REFERENCE and other["weights"] == row["weights"]
        ]
        compared = compare_tokens(row["prompts"], references[0] if references else ())
        row["token_match"] = compared["token_match"]
