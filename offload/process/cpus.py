"""Number of processors that this process may keep busy, and that other programs leave free.

A container sees all processors of the machine, but gets a quota of their time: threads beyond it
only wait for each other. Source: cgroup-v2.rst and scheduler/sched-bwc.rst of Linux. The same holds
for processors that other programs use: of two threads that meet at every product, one would wait
there until the other is scheduled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from offload.process.memory import controller_cgroups
from offload.process.other_processes import seconds_of_other_processes

_PROC = Path("/proc")
LOAD_INTERVAL_SECONDS = 0.5
"""Interval between two load samples: the kernel counts in hundredths of a second."""
_QUOTA_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


class CpuMonitor:
    """Count the processors that other programs leave free, also while this process runs.

    Args:
        usable: processors that the process may use.
        installed: processors of the machine.
        seconds_of_other_processes: processor seconds of other programs so far.
        clock: seconds.
    """

    def __init__(
        self,
        usable: Callable[[], int],
        installed: int,
        seconds_of_other_processes: Callable[[], float] = seconds_of_other_processes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._usable, self._installed = usable, installed
        self._seconds_of_other_processes, self._clock = seconds_of_other_processes, clock
        self._last = (clock(), seconds_of_other_processes())
        self._n_cpus = usable()

    def n_cpus(self) -> int:
        """Return at least 1; measured over the time since the last sample, or that sample's."""
        then, seconds_then = self._last
        now = self._clock()
        if now - then >= LOAD_INTERVAL_SECONDS:
            seconds = self._seconds_of_other_processes()
            n_busy = (seconds - seconds_then) / (now - then)
            n_free = round(self._installed - n_busy)
            self._n_cpus = max(1, min(self._usable(), n_free))
            self._last = (now, seconds)
        return self._n_cpus


def thread_counts(max_threads: int) -> tuple[int, ...]:
    """Return the numbers of threads that a pass may use while other programs compute, largest
    first. They are few, since each is tested for its effect on the bits of a sum."""
    quarters = (max_threads * i // 4 for i in (4, 3, 2, 1))
    return tuple(dict.fromkeys([n for n in quarters if n > 1] + [1]))


def threads_for_load(max_threads: int) -> int:
    """Return the largest of `thread_counts` for which there are free processors now."""
    n_free = free_cpus()
    return next((n for n in thread_counts(max_threads) if n <= n_free), 1)


def free_cpus() -> int:
    """Return how many processors this process may use and other programs leave free, at least 1."""
    return _monitor().n_cpus()


@cache
def _monitor() -> CpuMonitor:
    return CpuMonitor(usable_cpus, os.cpu_count() or 1)


def usable_cpus(proc: Path = _PROC) -> int:
    """Return the processors that the process may run on, within the quotas of its cgroups."""
    affinity = getattr(os, "sched_getaffinity", None)
    n_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min([n_cpus, *_quotas(proc)])


def _quotas(proc: Path) -> Iterator[int]:
    for location in controller_cgroups("cpu", proc):
        for directory in location.upwards():
            contents = [_read(directory / name) for name in _QUOTA_FILES[location.version]]
            words = " ".join(contents).split()
            # No quota is "-1 100000" in version 1 and "max 100000" in version 2.
            if len(words) == 2 and all(word.isdecimal() for word in words):
                quota, period = map(int, words)
                yield max(1, -(-quota // max(period, 1)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
