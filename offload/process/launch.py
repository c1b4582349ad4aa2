"""Programs that run as children of this process, and never outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from offload.process.signals import handling

_FORWARDED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGINT)
_ENTER = str(Path(__file__).resolve().with_name("enter.py"))


def tied_argv(argv: Sequence[str], cgroup_files: Sequence[Path] = ()) -> list[str]:
    """The command that becomes `argv`, and that the kernel kills when this process ends.

    More precisely when the thread ends that starts it: it has to wait for the program.

    Args:
        cgroup_files: files of cgroups (cgroup.procs) to write the program's id to first.
    """
    entered = [str(path) for path in cgroup_files]
    return [sys.executable, "-I", "-S", _ENTER, str(os.getpid()), *entered, "--", *argv]


def exit_code(status: int) -> int:
    """subprocess reports a signal as its negative number, shells as 128 + number."""
    return 128 - status if status < 0 else status


def run_forwarding(argv: Sequence[str], env: Mapping[str, str] | None) -> int:
    """Run `argv` to its end, passing signals on; the exit code as a shell would report it."""
    children: list[subprocess.Popen[bytes]] = []

    def forward(number: int, frame: FrameType | None) -> None:
        # A terminal sends Ctrl-C to the child by itself; a second one would break its clean-up.
        if children and not (number == signal.SIGINT and _terminal_is_ours()):
            children[0].send_signal(number)

    with handling(_FORWARDED, forward):
        children.append(subprocess.Popen(argv, env=env))
        return exit_code(children[0].wait())


def _terminal_is_ours() -> bool:
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
