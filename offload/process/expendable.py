"""Processes that may be lost: they do a stranger's work, within limits that the kernel keeps."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path


def become_expendable(max_bytes: int) -> None:
    """Hold this process to so much memory; where a cgroup's ends, it goes before the others."""
    with suppress(OSError):  # a sandbox without /proc
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_cpu_seconds(seconds: int) -> None:
    """Let the kernel end this process after so many more seconds of computing (one at least)."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    requested = int(time.process_time()) + 1 + seconds
    if hard != resource.RLIM_INFINITY:
        requested = min(requested, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (requested, hard))


def command_of(module: str) -> list[str]:
    """What runs a module's `main`, and finds modules where this process does.

    `python -m` would look into the working directory before anything else: a folder of downloaded
    files may have a `json.py` in it.
    """
    path = [str(item) for item in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code]
