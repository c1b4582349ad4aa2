"""How a program is started that never outlives this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

_ENTER = str(Path(__file__).resolve().with_name("enter.py"))


def tied_argv(argv: Sequence[str], cgroup_files: Sequence[Path] = ()) -> list[str]:
    """The command that becomes `argv`, and that the kernel kills when this process ends.

    More precisely when the thread ends that starts it: it has to wait for the program.

    Args:
        cgroup_files: files of cgroups (cgroup.procs) to write the program's id to first.
    """
    entered = [str(path) for path in cgroup_files]
    return [sys.executable, "-I", "-S", _ENTER, str(os.getpid()), *entered, "--", *argv]
