"""What other programs take of the processors while something is timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil

MAX_SHARE = 0.1
"""Of all processors. Beside programs that took half of two cores, 64 rows of a model of 3 G weights
were timed at 2.7 times what they take; its passes stayed at 31 rows, where 63 cost the same."""
_TICK_SECONDS = 0.01  # how finely the kernel counts


class OtherProcesses:
    """Whether other programs computed inside the with-block that gives it; known at its end."""

    share = 0.0
    """Of the seconds of all processors."""

    @property
    def are_busy(self) -> bool:
        return self.share > MAX_SHARE


@contextmanager
def beside_other_processes() -> Iterator[OtherProcesses]:
    """Of programs of users alone: the kernel's own work may be ours, reads that it decrypts say."""
    result, begin, before = OtherProcesses(), time.monotonic(), seconds_of_other_processes()
    yield result
    seconds = (time.monotonic() - begin) * (psutil.cpu_count() or 1)
    taken = seconds_of_other_processes() - before - 2 * _TICK_SECONDS
    result.share = max(taken, 0.0) / max(seconds, _TICK_SECONDS)


def seconds_of_other_processes() -> float:
    """Of the processors, since the machine was started; what a hypervisor took is among them."""
    machine = psutil.cpu_times()
    stolen = float(getattr(machine, "nice", 0.0)) + float(getattr(machine, "steal", 0.0))
    return float(machine.user) + stolen - float(psutil.Process().cpu_times().user)
