"""Interface of every measured program, peers and specdec alike: its task and its journal.

    python -m bench.peers.NAME TASK.json JOURNAL.jsonl

The journal is written line by line, so that the results of a killed program are not lost:

    {"loaded": {"load_seconds": s, "settings": {...}}}
    {"prompt": {... a `bench.process.results.Record`, and "ended": "whole" or "time"}}
    {"done": {"peak_rss_bytes": n}}
    {"error": "one line"}

An *arrival* is (seconds since the prompt was handed over, number of tokens): one for each pass of
the target, the first one with the prompt.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.process.results import Record
from bench.prompts.workloads import Prompt
from offload.errors import SpecdecError

MIN_TOKENS = 5
"""Minimum tokens of each prompt that is begun, however slow: a rate over fewer says little."""
MIN_SPECULATED_TOKENS = 16
"""The same with a draft: some passes beyond the first, which may wait for the draft to prefill the
prompt."""


@dataclass(frozen=True)
class Task:
    """Task of a program: what to decode and how; `options` are specific to the program."""

    model: str
    draft: str | None
    prompts: tuple[Prompt, ...]
    n_tokens: int
    seconds: float
    """Time for decoding: a slow program decodes fewer prompts, and fewer tokens of each."""
    memory_bytes: int
    n_threads: int
    n_ctx: int
    min_tokens: int = MIN_TOKENS
    """Minimum tokens of each prompt that is begun, also when its time is over."""
    ignore_eos: bool = False
    options: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Task:
        values = json.loads(path.read_text(encoding="utf-8"))
        prompts = tuple(Prompt(**prompt) for prompt in values.pop("prompts"))
        return cls(prompts=prompts, **values)


class Journal:
    """File in which a program writes down its results at once."""

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._started = time.perf_counter()

    def loaded(self, settings: dict[str, Any]) -> None:
        """Note that the model is ready; call once, before the first prompt."""
        seconds = time.perf_counter() - self._started
        self.note("loaded", {"load_seconds": seconds, "settings": settings})
        self._pace = _Pace(self._task)

    def decode(self, decode: Callable[[Prompt, Clock], dict[str, Any]]) -> list[dict[str, Any]]:
        """Call `decode` for the prompts that there is time for, and return the records.

        `decode` returns more fields of its record. It must note every arrival on the clock and end
        when the clock says so.
        """
        records = []
        for prompt in self._task.prompts:
            if self._pace.is_over:
                break
            clock = Clock(self._task.n_tokens, self._pace.time_limit(), self._task.min_tokens)
            extras = decode(prompt, clock)
            self._pace.count()
            record = asdict(Record(prompt.name, category=prompt.category)) | clock.record()
            records.append(record | extras)
            self.note("prompt", records[-1])
        return records

    def done(self) -> None:
        from offload.process.memory import process_memory

        self.note("done", {"peak_rss_bytes": process_memory().peak_rss_bytes})

    def failed(self, error: BaseException) -> None:
        text = " ".join(str(error).split())
        name = "" if isinstance(error, SpecdecError) else f"{type(error).__name__}: "
        self.note("error", (name + text)[:500])

    def note(self, kind: str, value: Any) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({kind: value}) + "\n")


class Clock:
    """Clock of one prompt: arrival times of its tokens, and bytes read for them."""

    def __init__(self, num_requested: int, limit_seconds: float, min_count: int) -> None:
        self._num_requested, self._min_count = num_requested, min_count
        self.limit_seconds = limit_seconds
        self._arrivals: list[tuple[float, int]] = []
        self._read = [bytes_read()]
        self._started = time.perf_counter()

    def reach(self, n_tokens: int) -> None:
        """Note the arrival of so many tokens."""
        self._arrivals.append((time.perf_counter() - self._started, n_tokens))
        if len(self._arrivals) == 1:
            self._read.append(bytes_read())

    @property
    def n_tokens(self) -> int:
        return sum(n for _, n in self._arrivals)

    @property
    def is_up(self) -> bool:
        """Return whether this prompt has used its share of the time."""
        seconds = time.perf_counter() - self._started
        return self.n_tokens >= self._min_count and seconds > self.limit_seconds

    def record(self) -> dict[str, Any]:
        read = [*self._read, bytes_read()]
        return {
            "arrivals": self._arrivals,
            "bytes_read": None if None in read else read,
            "ended": "time" if self.is_up and self.n_tokens < self._num_requested else "whole",
        }


class _Pace:
    """Scheduler that shares the time left evenly among the prompts left."""

    def __init__(self, task: Task) -> None:
        self._deadline = time.perf_counter() + task.seconds
        self._n_left = len(task.prompts)

    @property
    def is_over(self) -> bool:
        return time.perf_counter() >= self._deadline

    def time_limit(self) -> float:
        """Return the seconds for the next prompt."""
        return (self._deadline - time.perf_counter()) / self._n_left

    def count(self) -> None:
        self._n_left -= 1


def bytes_read() -> int | None:
    """Return bytes that storage delivered to this process: page faults, read-ahead, direct reads.

    Source: `read_bytes` of /proc/self/io (Documentation/filesystems/proc.rst of Linux). None where
    the system does not report them.
    """
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


def run_program(argv: Sequence[str], program: Callable[[Task, Journal], None]) -> int:
    """Run a task as the `main` of a measured program; return the exit code."""
    task = Task.read(Path(argv[0]))
    journal = Journal(Path(argv[1]), task)
    try:
        program(task, journal)
        journal.done()
    except Exception as error:  # peers fail in many ways; each is a result
        journal.failed(error)
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0
