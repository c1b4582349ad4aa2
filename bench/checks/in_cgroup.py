"""A check that runs itself again in a cgroup of its own, where the kernel enforces a limit."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import typer

from offload.errors import SpecdecError
from offload.process.limited import OK, Limits, run_limited

INSIDE = "--inside"
"""Option of a check's second run."""


class KilledByTheKernel(SpecdecError):
    """A budget was exceeded."""


def run_in_cgroup(
    module: str, options: Sequence[str], limit_bytes: int, max_seconds: int = 3600
) -> None:
    """Run a check with a limit of its memory, and print what it prints.

    Raises KilledByTheKernel; typer.Exit with code 2 if the check fails.
    """
    argv = [sys.executable, "-m", module, *options, INSIDE]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        outcome = run_limited(argv, Limits(limit_bytes, max_seconds), os.environ, log)
        typer.echo(log.read_text())
    if outcome.oom_kills:
        raise KilledByTheKernel("more memory than the budget was in use: the kernel ended it")
    if outcome.exit != OK:
        raise typer.Exit(2)
