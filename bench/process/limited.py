"""One program inside limits of memory, storage and time, watched from outside.

Everything that is measured here is measured the same way for every program, ours included.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from offload.process.cgroup import MemoryCgroup
from offload.process.signals import handling
from offload.storage.read_limit import ReadLimit

OK, OOM_KILLED, TIMED_OUT, FAILED = "ok", "oom-killed", "timeout", "failed"
_SAMPLE_SECONDS = 0.1
_ENDING = (signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    """What a process is held to."""

    memory_bytes: int | None
    """Of a memory cgroup; None where no cgroup is wanted."""
    seconds: float
    """Wall time after which the process is killed."""
    reads: ReadLimit | None = None
    """How fast it may read; only together with a memory cgroup."""


@dataclass(frozen=True)
class Outcome:
    """How a process ended, and what it took."""

    exit: str
    """OK, OOM_KILLED (by the kernel, at the limit), TIMED_OUT or FAILED."""
    code: int
    """Exit code; 128 + n where signal n ended it."""
    seconds: float
    peak_anonymous_bytes: int
    """Largest of the samples: memory that is not page cache."""
    cgroup_peak_bytes: int | None
    """The kernel's own figure, page cache included; None without a cgroup."""


def run_limited(argv: Sequence[str], limits: Limits, env: Mapping[str, str], log: Path) -> Outcome:
    """Run `argv` to its end or its limit; what it prints goes to `log`.

    Raises:
        offload.process.cgroup.CgroupUnavailable: a limit cannot be set; nothing was started.
    """
    with ExitStack() as stack:
        command = list(argv)
        group: MemoryCgroup | None = None
        if limits.memory_bytes is not None:
            group = stack.enter_context(MemoryCgroup.create(limits.memory_bytes))
            more = () if limits.reads is None else stack.enter_context(limits.reads.applied(group))
            command = group.command_inside(command, more)
        output = stack.enter_context(log.open("ab"))
        started = time.monotonic()
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=True
        )
        try:
            with handling(_ENDING, _end):
                is_late, peak = _watch(process, group, started + limits.seconds)
        finally:
            _kill_all(process)
        code = process.returncode
        code = 128 - code if code < 0 else code
        return Outcome(
            exit=_cause(code, is_late, group),
            code=code,
            seconds=time.monotonic() - started,
            peak_anonymous_bytes=peak,
            cgroup_peak_bytes=None if group is None else group.peak_bytes,
        )


def _cause(code: int, is_late: bool, group: MemoryCgroup | None) -> str:
    # A process that the kernel killed beneath the program is a kill as well.
    if group is not None and group.oom_kills and code != 0:
        return OOM_KILLED
    if is_late:
        return TIMED_OUT
    return OK if code == 0 else FAILED


def _end(number: int, frame: FrameType | None) -> None:
    """Instead of ending us at once a signal ends the block: the process must not outlive us."""
    raise SystemExit(128 + number)


def _watch(
    process: subprocess.Popen[bytes], group: MemoryCgroup | None, deadline: float
) -> tuple[bool, int]:
    """(whether the deadline passed first, peak of anonymous memory in bytes)."""
    peak = 0
    while True:
        peak = max(peak, _anonymous_bytes(process.pid) if group is None else group.anonymous_bytes)
        left = deadline - time.monotonic()
        if left <= 0:
            return process.poll() is None, peak
        try:
            process.wait(min(_SAMPLE_SECONDS, left))
            return False, peak
        except subprocess.TimeoutExpired:
            continue


def _anonymous_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """The process and whatever it started: they are a session of their own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
