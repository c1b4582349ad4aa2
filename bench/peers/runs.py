"""Runs of a program on prompts, each in a fresh process inside the same limits."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from bench.options import UsageMistake
from bench.peers.program import MIN_SPECULATED_TOKENS, MIN_TOKENS, Task
from bench.peers.registry import MEMORY, MIN_AMOUNT_BYTES, Peer, Weights, settings_to_try
from bench.process.child import forget_files, forget_model
from bench.process.interpreters import Interpreter, executable, own_packages
from bench.process.probe import probe_bandwidth
from bench.prompts.workloads import Prompt
from bench.results import summarise
from offload.process import limited
from offload.process.limited import Limits, Outcome
from offload.storage.read_limit import ReadLimit
from offload.units import GIB
from specdec.cli.enforce import child_environment
from specdec.models.weight_files import largest_weight_file, weight_files
from specdec.run_options import DEFAULT_CTX_SIZE

LOAD_SECONDS = 300.0
"""Time limit beside that of decoding, which may be exceeded for the last prompt."""
REWRITE_BYTES_PER_SECOND = 10e6
"""Assumed speed of converting weights, for its time limit: LOAD_SECONDS and twice that time."""
TRIAL_TOKENS = 10
"""Tokens of a trial: the page cache fills during the first few tokens."""
TRIAL_SPECULATED_TOKENS = MIN_SPECULATED_TOKENS
_AMOUNT = "cpu_memory_bytes"
_JOURNAL: dict[str, Any] = {"loaded": {}, "done": {}, "error": None, "prompts": []}
_QUIET = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"}


@dataclass(frozen=True)
class RunSettings:
    """Settings shared by all programs."""

    memory_bytes: int
    n_tokens: int
    seconds: float
    """Time for decoding, of each program."""
    n_threads: int
    n_ctx: int
    enforce: bool = True
    storage_mbps: float | None = None
    """Limit of reads, in MB (10^6 bytes) per second."""
    ignore_eos: bool = False
    cpu_memory_bytes: int | None = None
    """Memory for accelerate's weights, instead of the best of several amounts."""
    load: Mapping[str, Any] = field(default_factory=dict)
    """More keywords of `specdec.load`, for specdec alone."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of `LLM.generate`, for specdec alone; greedy if empty."""
    predict: bool = False
    """Whether specdec's plan is compared with the measurements."""
    interpreters: Mapping[str, Interpreter] = field(default_factory=dict)
    """Interpreter by program, for programs with one of their own."""


def settings_for(load: Mapping[str, Any], **more: Any) -> RunSettings:
    """Return settings with `load`'s threads and context for all, its other keywords for specdec."""
    if load.get("ctx_size") == 0:
        raise UsageMistake("-c 0 is each program's own: give a number of tokens, for all of them")
    own = ("model", "draft_model", "memory_budget", "ctx_size", "threads")
    return RunSettings(
        n_threads=load.get("threads") or psutil.cpu_count(logical=False) or 1,
        n_ctx=load.get("ctx_size") or DEFAULT_CTX_SIZE,
        load={name: value for name, value in load.items() if name not in own},
        **more,
    )


@dataclass(frozen=True)
class ProcessRun(Outcome):
    """Outcome of one process, and the contents of its journal."""

    reason: str | None
    """One line about a failure."""
    storage_bytes_per_second: float
    """Storage speed probed just before, without a throttle."""
    load_seconds: float | None
    settings: dict[str, Any]
    peak_rss_bytes: int | None
    records: list[dict[str, Any]]
    notes: dict[str, Any] = field(default_factory=dict)
    """Further entries of the journal."""

    def results(self) -> dict[str, Any]:
        """Return the fields for JSON; `exit` and `reason` describe its end."""
        left_out = ("code", "oom_kills", "records", "settings", "notes")
        return {name: value for name, value in vars(self).items() if name not in left_out}


class ProgramRunner:
    """Runner of a program's processes, with its fastest settings."""

    def __init__(self, peer: Peer, weights: Weights, settings: RunSettings) -> None:
        self.peer, self.weights, self.settings = peer, weights, settings
        self.trials: list[dict[str, Any]] = []
        """Settings that were tried for tuning, and their speeds."""
        self._tuned: dict[str, Any] | None = None
        if peer.tunes == MEMORY and settings.cpu_memory_bytes is not None:
            self._tuned = {_AMOUNT: settings.cpu_memory_bytes}
        self.rewrite_seconds: float | None = None
        """Seconds for converting the weights before anything is measured."""
        self._rewritten: tempfile.TemporaryDirectory[str] | None = None
        self._interpreter = settings.interpreters.get(peer.name)

    def close(self) -> None:
        """Remove files that the program wrote beside the model."""
        if self._rewritten is not None:
            self._rewritten.cleanup()

    def learn_from(self, runners: Iterable[ProgramRunner | None]) -> None:
        """Take over the best memory, less the draft's, from a runner with the same target."""
        if self.peer.tunes != MEMORY or self._tuned is not None:
            return
        for other in runners:
            if (
                other is not None
                and other._tuned is not None
                and (other.peer.module, other.weights) == (self.peer.module, self.weights)
            ):
                draft = self.weights.draft_path if self.peer.uses_draft else None
                used = sum(p.stat().st_size for p in weight_files(draft)) if draft else 0
                self._tuned = {_AMOUNT: max(other._tuned[_AMOUNT] - used, MIN_AMOUNT_BYTES)}

    def run(self, prompts: Sequence[Prompt], seconds: float) -> ProcessRun:
        """Run one process for these prompts."""
        if self.peer.rewrites and self.rewrite_seconds is None:
            rewriting = self._rewrite()
            if rewriting.exit != limited.OK:
                return rewriting
            self.rewrite_seconds = rewriting.seconds
        if self.peer.tunes and self._tuned is None:
            self._tuned, failed = self._find_fastest(prompts[0])
            if failed is not None:
                return failed
        return self._run(prompts, self.settings.n_tokens, seconds, self._tuned or {})

    def _rewrite(self) -> ProcessRun:
        """Run a process without prompts: it loads the model, which converts it, and ends."""
        # On the model's own storage, which is measured.
        parent = self.weights.model.parent
        self._rewritten = tempfile.TemporaryDirectory(prefix=f".{self.peer.name}-", dir=parent)
        n_bytes = sum(path.stat().st_size for path in weight_files(self.weights.model))
        return self._run([], 0, n_bytes / REWRITE_BYTES_PER_SECOND, {})

    def _find_fastest(self, prompt: Prompt) -> tuple[dict[str, Any] | None, ProcessRun | None]:
        """Return (the fastest settings, None), or (None, the last run) if none works."""
        n_tokens = TRIAL_TOKENS if self.peer.tunes == MEMORY else TRIAL_SPECULATED_TOKENS
        best: tuple[float, dict[str, Any]] | None = None
        run = None
        for tried in settings_to_try(self.peer, self.settings.memory_bytes):
            run = self._run([prompt], n_tokens, LOAD_SECONDS, tried)
            speed = summarise(run.records)["tokens_per_second"]
            self.trials.append({**tried, "tokens_per_second": speed, "exit": run.exit})
            if run.exit == limited.OK and speed and (best is None or speed > best[0]):
                best = speed, tried
        return (best[1], None) if best is not None else (None, run)

    def _run(
        self,
        prompts: Sequence[Prompt],
        n_tokens: int,
        seconds: float,
        tuned: Mapping[str, Any],
    ) -> ProcessRun:
        settings = self.settings
        task = Task(
            model=str(self.weights.model),
            draft=str(self.weights.draft) if self.peer.uses_draft else None,
            prompts=tuple(prompts),
            n_tokens=n_tokens,
            seconds=seconds,
            memory_bytes=settings.memory_bytes,
            n_threads=settings.n_threads,
            n_ctx=settings.n_ctx,
            min_tokens=MIN_SPECULATED_TOKENS if self.peer.speculates else MIN_TOKENS,
            ignore_eos=settings.ignore_eos,
            options={**self._options(), **tuned},
        )
        more = "".join(f", {describe_tuned(name, value)}" for name, value in tuned.items())
        what = f"{len(prompts)} prompts x {n_tokens} tokens{more}" if prompts else "weights anew"
        say(f"{self.peer.name}: {what}")
        bandwidth = probe_bandwidth(largest_weight_file(self.weights.model)).bytes_per_second
        self._forget_cached()
        with tempfile.TemporaryDirectory(prefix="specdec-bench-") as name:
            folder = Path(name)
            task.write(folder / "task.json")
            argv = [executable(self._interpreter), "-m", self.peer.module]
            argv += [str(folder / "task.json"), str(folder / "journal.jsonl")]
            own = {} if self._interpreter is None else own_packages(folder)
            outcome = limited.run_limited(
                argv, self._limits(seconds), child_environment({**_QUIET, **own}), folder / "log"
            )
            journal = _read_journal(folder / "journal.jsonl")
            return ProcessRun(
                **vars(outcome),
                reason=_reason(outcome, journal, folder / "log"),
                storage_bytes_per_second=bandwidth,
                load_seconds=journal["loaded"].get("load_seconds"),
                settings=journal["loaded"].get("settings", {}),
                peak_rss_bytes=journal["done"].get("peak_rss_bytes"),
                records=journal["prompts"],
                notes={k: v for k, v in journal.items() if k not in _JOURNAL},
            )

    def _forget_cached(self) -> None:
        """Drop cached pages, so that every process begins with cold storage."""
        forget_model(self.weights.model)
        if self.weights.draft_path is not None:
            forget_model(self.weights.draft_path)
        if self._rewritten is not None:
            forget_files(path for path in Path(self._rewritten.name).rglob("*") if path.is_file())

    def _options(self) -> dict[str, Any]:
        if self._rewritten is not None:
            return {"rewritten": self._rewritten.name}
        if self.peer.module == "bench.peers.specdec":
            more: dict[str, Any] = {} if self.peer.uses_draft else {"spec_type": "none"}
            if self.settings.sampling:
                more["sampling"] = dict(self.settings.sampling)
            if self.settings.predict:
                more["predict"] = True
            return {**self.settings.load, **more}
        return {}

    def _limits(self, seconds: float) -> Limits:
        mbps, model = self.settings.storage_mbps, self.weights.model
        return Limits(
            memory_bytes=self.settings.memory_bytes if self.settings.enforce else None,
            seconds=LOAD_SECONDS + 2 * seconds,
            reads=None if mbps is None else ReadLimit(model, int(mbps * 1e6)),
        )


def describe_tuned(name: str, value: float) -> str:
    """Return a tuned setting as text for the terminal."""
    if name == _AMOUNT:
        return f"weights in {value / GIB:.2f} GiB"
    return f"{name.replace('_', ' ')} {value:g}"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _read_journal(path: Path) -> dict[str, Any]:
    """Return the contents of a journal; a last line that a kill cut off is left out."""
    journal = deepcopy(_JOURNAL)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            [(kind, value)] = json.loads(line).items()
        except ValueError:
            continue
        if kind == "prompt":
            journal["prompts"].append(value)
        else:
            journal[kind] = value
    return journal


def _reason(outcome: Outcome, journal: Mapping[str, Any], log: Path) -> str | None:
    """Return one line about a failed run; None if it succeeded."""
    if outcome.exit == limited.OK:
        return None
    if outcome.exit == limited.OOM_KILLED:
        return "killed by the kernel at the memory limit"
    if outcome.exit == limited.TIMED_OUT:
        return f"stopped after {outcome.seconds:.0f} s"
    if journal["error"]:
        return str(journal["error"])
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    last = said[-1][:300] if said else "it said nothing"
    return f"exit code {outcome.code}: {last}"
