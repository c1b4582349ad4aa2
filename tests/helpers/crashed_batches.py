"""`specdec batch` killed by SIGKILL again and again: during loading, between or after answers."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from forked import ForkedProcess

LOG_BYTES = 2 * (4096 + 24)
"""Bytes that a short record adds to the journal's log: two pages with their headers."""
EARLY_SHARE, EARLY_SECONDS = 0.2, 0.2
"""Share of the kills while the model loads (0.1 s), within so many seconds of a batch of 1.3 s."""


def start(argv: Sequence[str], out: Path) -> ForkedProcess:
    return ForkedProcess(["specdec", "batch", *argv, "-o", str(out)], os.environ, text=False)


def finish(argv: Sequence[str], out: Path) -> bytes:
    """Let a batch finish, and return its output."""
    process = start(argv, out)
    _, err = process.communicate()
    assert process.returncode == 0, err.decode()
    return out.read_bytes()


def kill(argv: Sequence[str], out: Path, max_bytes: int, chance: random.Random) -> int:
    """Start a batch, kill it early or before it writes `max_bytes` more, and return its bytes."""
    process = start(argv, out)
    if chance.random() < EARLY_SHARE:
        end = time.monotonic() + chance.uniform(0.0, EARLY_SECONDS)
        wait(process, lambda: time.monotonic() >= end)
    else:
        goal = partial_bytes(out) + chance.randrange(max_bytes)
        wait(process, lambda: partial_bytes(out) > goal)
        time.sleep(chance.uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode == -signal.SIGKILL, f"it ended by itself: {err.decode()}"
    return partial_bytes(out)


def wait(process: ForkedProcess, is_there: Callable[[], bool]) -> None:
    while not is_there() and process.poll() is None:
        time.sleep(0.005)


def partial_bytes(out: Path) -> int:
    """Return the bytes of the journal and of its log."""
    files = (out.with_name(out.name + ending) for ending in (".partial", ".partial-wal"))
    return sum(file.stat().st_size for file in files if file.exists())
