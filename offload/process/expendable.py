"""Processes that may be lost: they work on untrusted input, within limits of the kernel."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path


def become_expendable(max_bytes: int) -> None:
    """Limit this process's memory, and let the kernel kill it first when a cgroup's runs out."""
    with suppress(OSError):  # a sandbox without /proc
        Path("/proc/self/oom_score_adj").write_text("1000")
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def allow_cpu_seconds(seconds: int) -> None:
    """Let the kernel end this process after `seconds` more of processor time (one at least)."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    limit = int(time.process_time()) + 1 + seconds
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))


def command_of(module: str) -> list[str]:
    """Return a command that runs a module's `main`, with this process's module search path.

    `python -m` would look into the working directory before anything else: a folder of downloaded
    files may have a `json.py` in it.
    """
    path = [str(folder) for folder in sys.path]
    code = f"import sys; sys.path[:] = {path!r}; from {module} import main; sys.exit(main())"
    return [sys.executable, "-c", code]
