"""A memory limit that the kernel enforces: the honest test of a budget.

The kernel kills a process in the cgroup that takes more anonymous memory than the limit. Page cache
counts as well but is reclaimed first. Charges stay where memory was first touched, so a limited run
is a fresh process that enters the cgroup before it begins: limited.run_limited.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offload.process.cgroup_files import CgroupUnavailable as CgroupUnavailable
from offload.process.cgroup_files import make_cgroup, remove_cgroup, usable_parent, write_cgroup
from offload.process.memory import memory_cgroups

_KILL_ROUNDS, _KILL_PAUSE_SECONDS = 200, 0.01
_PEAK_FILES = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}
_EVENT_FILES = {1: "memory.oom_control", 2: "memory.events"}
_ANONYMOUS_KEYS = {1: "rss", 2: "anon"}
_NO_LIMIT_BYTES = 2**63 - mmap.PAGESIZE
"""Values that the kernel takes for no limit begin here: from 2**64 on it wraps to a limit of 0."""
_ENTER = str(Path(__file__).resolve().with_name("enter.py"))


def tied_argv(argv: Sequence[str], cgroup_files: Sequence[Path] = ()) -> list[str]:
    """Return a command that becomes `argv`, and that the kernel kills when this process ends.

    More precisely, when the thread that starts it ends: that thread has to wait for the program.

    Args:
        cgroup_files: files of cgroups (cgroup.procs) to write the program's id to first.
    """
    entered = [str(path) for path in cgroup_files]
    return [sys.executable, "-I", "-S", _ENTER, str(os.getpid()), *entered, "--", *argv]


class MemoryCgroup:
    """A cgroup with a memory limit (swap included); use as a context manager, or `remove` it."""

    def __init__(self, path: Path, version: int, limit_bytes: int) -> None:
        self.path = path
        self.version = version
        self.limit_bytes = limit_bytes

    @classmethod
    def create(cls, limit_bytes: int, *, proc: Path = Path("/proc")) -> MemoryCgroup:
        """Make a cgroup below the one of this process (version 2: or below one of its parents).

        A limit beyond all possible memory is no limit, as it is for the kernel.

        Raises:
            CgroupUnavailable: no memory controller, or no permission.
        """
        if limit_bytes <= 0:
            raise ValueError(f"a memory limit must be positive, not {limit_bytes} bytes")
        limit_bytes = min(limit_bytes, _NO_LIMIT_BYTES)
        # Where both versions are mounted, the memory controller is in version 1 if that has it.
        locations = sorted(memory_cgroups(proc), key=lambda location: location.version)
        reasons = []
        for location in locations:
            try:
                return _create_below(usable_parent(location), location.version, limit_bytes)
            except CgroupUnavailable as error:
                reasons.append(str(error))
        if not reasons:
            reasons.append("no cgroup file system with a memory controller is mounted")
        raise CgroupUnavailable(
            f"cannot make a memory cgroup: {'; '.join(reasons)}; "
            "run as root, or in a systemd user session with cgroup v2"
        )

    def add(self, pid: int) -> None:
        """Move a process in; memory that it touched before stays charged elsewhere."""
        write_cgroup(self.path / "cgroup.procs", pid)

    @property
    def procs_path(self) -> Path:
        """The file to which a process id is written to move that process in."""
        return self.path / "cgroup.procs"

    @property
    def peak_bytes(self) -> int | None:
        """Peak of charged memory, page cache included; None if the kernel does not record it."""
        try:
            return int((self.path / _PEAK_FILES[self.version]).read_text())
        except (OSError, ValueError):
            return None

    @property
    def anonymous_bytes(self) -> int:
        """Memory charged now that is not page cache, and so cannot be reclaimed."""
        try:
            lines = (self.path / "memory.stat").read_text().splitlines()
        except OSError:
            return 0
        stats = dict(line.split(" ", 1) for line in lines if " " in line)
        return int(stats.get(_ANONYMOUS_KEYS[self.version], "0"))

    def command_inside(self, argv: Sequence[str], further: Sequence[Path] = ()) -> list[str]:
        """Return a command that enters this cgroup and `further` ones, and then becomes `argv`.

        It must be started by this process, and does not outlive it.
        """
        return tied_argv(argv, (self.procs_path, *further))

    @property
    def oom_kills(self) -> int:
        """Number of processes that the kernel has killed here for lack of memory."""
        try:
            lines = (self.path / _EVENT_FILES[self.version]).read_text().splitlines()
        except OSError:
            return 0
        counts = dict(line.split(" ", 1) for line in lines if " " in line)
        return int(counts.get("oom_kill", "0"))

    def kill(self) -> None:
        """Kill the processes in it, in whatever session they are, until none is left.

        A process that starts others meanwhile is killed with them in the next step. Processes that
        the kernel cannot end, because they wait for a device, are given up after some steps.
        """
        for _ in range(_KILL_ROUNDS):
            pids = self.procs_path.read_text().split()
            if not pids:
                return
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(_KILL_PAUSE_SECONDS)

    def remove(self) -> None:
        """Remove the cgroup; no process may be left in it. Removing twice is allowed."""
        remove_cgroup(self.path)

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *exception: object) -> None:
        self.remove()


def _create_below(parent: Path, version: int, limit_bytes: int) -> MemoryCgroup:
    path = make_cgroup(parent)
    group = MemoryCgroup(path, version, limit_bytes)
    try:
        if version == 1:
            write_cgroup(path / "memory.limit_in_bytes", limit_bytes)
            # Memory plus swap; must not be below the limit of memory, so it comes second.
            if (path / "memory.memsw.limit_in_bytes").exists():
                write_cgroup(path / "memory.memsw.limit_in_bytes", limit_bytes)
        else:
            write_cgroup(path / "memory.max", limit_bytes)
            if (path / "memory.swap.max").exists():
                write_cgroup(path / "memory.swap.max", 0)
    except CgroupUnavailable:
        group.remove()
        raise
    return group
