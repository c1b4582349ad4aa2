"""One program inside limits of memory, storage and time, measured from outside.

Everything that is run and measured uses this: a command with `--enforce`, the processes of a
benchmark, and the programs that it compares with.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Protocol

from offload.process.cgroup import CgroupUnavailable, MemoryCgroup, tied_argv
from offload.process.cgroup_files import read_words
from offload.process.memory import memory_cgroups
from offload.process.signals import handling

OK, OOM_KILLED, TIMED_OUT, FAILED = "ok", "oom-killed", "timeout", "failed"
_SAMPLE_SECONDS = 0.1
_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT)
_ENDING = (signal.SIGTERM, signal.SIGHUP)


class CgroupLimit(Protocol):
    """A further limit on the processes of a cgroup, such as storage.read_limit.ReadLimit."""

    def applied(self, group: MemoryCgroup) -> AbstractContextManager[tuple[Path, ...]]:
        """Set the limit for a block; yield further cgroup files for the process to enter."""


@dataclass(frozen=True)
class Limits:
    """Limits of a process; None for no limit."""

    memory_bytes: int | None = None
    """Limit of the memory cgroup."""
    seconds: float | None = None
    """Wall time after which the process is killed."""
    reads: CgroupLimit | None = None
    """Limit of its read bandwidth; only together with a memory limit."""


@dataclass(frozen=True)
class Outcome:
    """Exit status and resources of a process."""

    exit: str
    """OK, OOM_KILLED (by the kernel, at the limit), TIMED_OUT or FAILED."""
    code: int
    """Exit code; 128 + n where signal n ended it."""
    seconds: float
    peak_anonymous_bytes: int
    """Maximum of the samples of memory that is not page cache."""
    cgroup_peak_bytes: int | None
    """The kernel's own figure, page cache included; None without a cgroup of ours."""
    oom_kills: int
    """Number of its processes that the kernel killed for lack of memory."""


def run_limited(
    argv: Sequence[str],
    limits: Limits = Limits(),
    env: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> Outcome:
    """Run `argv` to its end or its limit. It dies with this process, however that ends.

    Args:
        log: its output is appended here; the process leads a process group, all of which is killed
            when it has ended. Without a log it shares our terminal, and our signals are passed on
            to it. In both cases processes left in its cgroup are killed.

    Raises:
        CgroupUnavailable: a limit cannot be set; nothing was started.
    """
    with ExitStack() as stack:
        group, command = _confined(argv, limits, stack)
        output = None if log is None else stack.enter_context(log.open("ab"))
        started = time.monotonic()
        deadline = None if limits.seconds is None else started + limits.seconds
        with _running(command, env, output) as process:
            is_late, peak = _watch(process, group, deadline)
        status = process.returncode
        code = 128 - status if status < 0 else status  # -n for signal n, in subprocess's words
        oom_kills = 0 if group is None else group.oom_kills
        return Outcome(
            exit=_cause(code, is_late, oom_kills),
            code=code,
            seconds=time.monotonic() - started,
            peak_anonymous_bytes=peak,
            cgroup_peak_bytes=None if group is None else group.peak_bytes,
            oom_kills=oom_kills,
        )


def _confined(
    argv: Sequence[str], limits: Limits, stack: ExitStack
) -> tuple[MemoryCgroup | None, list[str]]:
    """Return (the cgroup if there is one, the command that enters it and becomes `argv`)."""
    if limits.memory_bytes is None:
        return None, tied_argv(argv)
    try:
        group = stack.enter_context(MemoryCgroup.create(limits.memory_bytes))
    except CgroupUnavailable as error:
        if limits.reads is not None:
            raise
        return None, _systemd_argv(tied_argv(argv), limits.memory_bytes, error)
    stack.callback(group.kill)
    more = () if limits.reads is None else stack.enter_context(limits.reads.applied(group))
    return group, group.command_inside(argv, more)


def _systemd_argv(argv: Sequence[str], limit_bytes: int, error: CgroupUnavailable) -> list[str]:
    """Return `argv` under systemd-run if a user session can limit memory; else raise `error`."""
    scope = ["systemd-run", "--user", "--scope", "--quiet"]
    # With version 1 a user session accepts the limit and ignores it.
    has_v2 = any(
        "memory" in read_words(location.mount / "cgroup.controllers")
        for location in memory_cgroups()
        if location.version == 2
    )
    if not has_v2 or shutil.which("systemd-run") is None:
        raise error
    if subprocess.run([*scope, "true"], capture_output=True, check=False).returncode != 0:
        raise error
    limits = ["-p", f"MemoryMax={limit_bytes}", "-p", "MemorySwapMax=0"]
    return [*scope, *limits, "--", *argv]


@contextmanager
def _running(
    command: list[str], env: Mapping[str, str] | None, output: IO[bytes] | None
) -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process for the time of a block, after which it has ended."""
    forwarder = _Forwarder()
    is_alone = output is not None
    with handling(*((_ENDING, _end) if is_alone else (_FORWARDED, forwarder))):
        process = subprocess.Popen(
            command, env=env, stdout=output, stderr=output, start_new_session=is_alone
        )
        try:
            forwarder.begin(process)
            yield process
        finally:
            with suppress(ProcessLookupError):
                if is_alone:
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
            process.wait()


class _Forwarder:
    """Passes signals on to a process, also those that came while it was being started."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: list[int] = []

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to the child by itself; a second one would break its clean-up.
        if number == signal.SIGINT and _terminal_is_ours():
            return
        if self._process is None:
            self._pending.append(number)
        else:
            self._process.send_signal(number)

    def begin(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        for number in self._pending:
            process.send_signal(number)


def _terminal_is_ours() -> bool:
    """Return whether Ctrl-C reaches us from a terminal, wherever standard input comes from."""
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    except OSError:
        return False
    finally:
        os.close(terminal)


def _end(number: int, frame: FrameType | None) -> None:
    """Raise to end the block instead of this process: the child must not outlive us."""
    raise SystemExit(128 + number)


def _watch(
    process: subprocess.Popen[bytes], group: MemoryCgroup | None, deadline: float | None
) -> tuple[bool, int]:
    """Return (whether the deadline passed first, peak of anonymous memory in bytes)."""
    peak = 0
    while True:
        peak = max(peak, _anonymous_bytes(process.pid) if group is None else group.anonymous_bytes)
        left = _SAMPLE_SECONDS if deadline is None else deadline - time.monotonic()
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


def _cause(code: int, is_late: bool, oom_kills: int) -> str:
    # A child of the program that the kernel killed counts as well.
    if oom_kills and code != 0:
        return OOM_KILLED
    if is_late:
        return TIMED_OUT
    return OK if code == 0 else FAILED
