"""`--enforce`: run the same command in a process that the kernel limits to the budget.

All memory of the process must count, from its first page on. So the command is started again
inside a memory cgroup; an environment variable tells the child that it is inside.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from offload.errors import SpecdecError
from offload.process.limited import Limits, run_limited
from offload.units import format_bytes, parse_bytes
from specdec import check_packages

KILLED = 137  # 128 + SIGKILL: what the kernel does at the limit
_MARK = "SPECDEC_ENFORCED_BYTES"
COMMAND_NAME = "SPECDEC_COMMAND_NAME"
"""Environment variable with the command name that the benchmark shows."""


class EnforceError(SpecdecError):
    """`--enforce` without a budget that can be enforced, or a program that is not there."""


def enforced_bytes() -> int | None:
    """Return the limit that this process was started under; None outside of `--enforce`."""
    text = os.environ.get(_MARK, "")
    return int(text) if text.isdigit() else None


def run_enforced(
    module: str,
    argv: Sequence[str],
    memory_budget: str | int,
) -> int:
    """Run `python -m module argv...` in a memory cgroup of `memory_budget`; return its exit code.

    Raises:
        EnforceError: the budget is "auto".
        offload.process.cgroup.CgroupUnavailable: the rights are missing; the message says which.
    """
    if memory_budget == "auto":
        raise EnforceError("--enforce needs a size: give --memory-budget, for example 3.5GiB")
    limit_bytes = parse_bytes(memory_budget)
    if limit_bytes < 64 * 2**20:
        raise EnforceError(
            f"--memory-budget {memory_budget} is {format_bytes(limit_bytes)}, "
            "too little to start Python in; `specdec plan` names the smallest budget that works"
        )
    command = [sys.executable, "-m", module, *argv]
    environment = child_environment({_MARK: str(limit_bytes)})
    outcome = run_limited(command, Limits(limit_bytes), environment)
    if outcome.oom_kills:
        name = f"specdec {argv[0]}" if module == "specdec" and argv else module
        victim = name if outcome.code == KILLED else f"a process started by {name}"
        print(
            f"{victim} was killed by the kernel: it needed more memory than the limit of "
            f"{format_bytes(limit_bytes)}; raise the limit",
            file=sys.stderr,
            flush=True,
        )
    return outcome.code


def run_benchmark(module: str, argv: Sequence[str]) -> NoReturn:
    """Replace this process by a program of `bench`, which this package must not import.

    As there is one process, Ctrl-C reaches that program, and it alone cleans up.
    """
    is_on_path = sys.version_info < (3, 11)  # later ones start the child without this directory
    try:
        check_packages("bench", is_on_path=is_on_path)
    except ImportError as error:
        raise EnforceError(str(error)) from error
    words = [sys.executable, "-m", module, *argv]
    sys.stdout.flush()
    os.execve(sys.executable, words, child_environment({COMMAND_NAME: "specdec"}))


def child_environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment in which `python -m specdec` or `bench` finds our packages first.

    `-m` puts the working directory in front of the path, where a user may well have a folder
    called `bench`: PYTHONSAFEPATH keeps it out (Python 3.11 and later).
    """
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **(extra or {})}
