"""How many processors this process may keep busy.

In a container the machine has all of its processors, and a quota of their time is what the
container gets: threads beyond it only wait for each other. Source: cgroup-v2.rst and
scheduler/sched-bwc.rst of Linux.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from offload.process.memory import controller_cgroups

_PROC = Path("/proc")
_QUOTA_FILES = {1: ("cpu.cfs_quota_us", "cpu.cfs_period_us"), 2: ("cpu.max",)}


def usable_cpus(proc: Path = _PROC) -> int:
    """Those that the process may run on, or as many as its cgroups grant the time of."""
    affinity = getattr(os, "sched_getaffinity", None)
    n_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min([n_cpus, *_quotas(proc)])


def _quotas(proc: Path) -> Iterator[int]:
    for location in controller_cgroups("cpu", proc):
        for directory in location.upwards():
            texts = [_read(directory / name) for name in _QUOTA_FILES[location.version]]
            words = " ".join(texts).split()
            # No quota is "-1 100000" in version 1 and "max 100000" in version 2.
            if len(words) == 2 and all(word.isdecimal() for word in words):
                quota, period = map(int, words)
                yield max(1, -(-quota // max(period, 1)))


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
