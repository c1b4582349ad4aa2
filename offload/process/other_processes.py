"""Processor time that other programs take while something is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MAX_SHARE = 0.1
"""Maximum share of all processors. Beside programs that took half of two cores, 64 tokens of a 3 G
model were timed at 2.7 times their cost; passes stayed at 31 tokens, where 63 cost the same."""
_TICK_SECONDS = 0.01  # how finely the kernel counts


class OtherProcesses:
    """The load of other programs inside the with-block that yields this; known at its end."""

    share = 0.0
    """Share of the seconds of all processors."""

    @property
    def are_busy(self) -> bool:
        return self.share > MAX_SHARE


@contextmanager
def beside_other_processes() -> Iterator[OtherProcesses]:
    """Measure user programs only: the kernel's own work may be ours, e.g. decrypting our reads."""
    result, begin, before = OtherProcesses(), time.monotonic(), seconds_of_other_processes()
    yield result
    seconds = (time.monotonic() - begin) * (psutil.cpu_count() or 1)
    taken = seconds_of_other_processes() - before - 2 * _TICK_SECONDS
    result.share = max(taken, 0.0) / max(seconds, _TICK_SECONDS)


def seconds_of_other_processes() -> float:
    """Return their processor seconds since the machine's start, time stolen by a hypervisor too."""
    machine = psutil.cpu_times()
    stolen = float(getattr(machine, "nice", 0.0)) + float(getattr(machine, "steal", 0.0))
    return float(machine.user) + stolen - float(psutil.Process().cpu_times().user)
