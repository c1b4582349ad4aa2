"""A script, not to be imported: becomes a program that dies with the process that started it.

    python -I -S enter.py PARENT_PID [CGROUP_PROCS_FILE ...] -- PROGRAM [ARGUMENT ...]

It moves itself into the cgroups before it becomes the program, so that all memory of the program
counts; unlike a hook between fork and exec, this is safe in a process with threads. It imports
nothing of ours: the standard library without `site` starts in hundredths of a second.
"""

from __future__ import annotations

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_CANNOT_ENTER, _CANNOT_RUN, _NOT_FOUND = 125, 126, 127  # as container runtimes and shells report it


def die_with(parent: int) -> None:
    """Make the kernel kill this process as soon as `parent` ends, in whatever way it ends.

    That lasts beyond exec (prctl(2)). A parent that ended before the call is detected afterwards.
    """
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Become the program; returns an exit code only if that fails."""
    # Undo Python's own signal settings; a signal that the parent ignores stays ignored.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    split = arguments.index("--")
    die_with(int(arguments[0]))
    program = arguments[split + 1 :]
    try:
        for path in arguments[1:split]:
            with open(path, "w") as file:
                file.write(f"{os.getpid()}\n")
    except OSError as error:
        print(f"cannot enter the cgroup {path}: {error.strerror}", file=sys.stderr)
        return _CANNOT_ENTER
    try:
        os.execvp(program[0], program)
    except OSError as error:
        print(f"cannot run {program[0]}: {error.strerror}", file=sys.stderr)
        return _NOT_FOUND if isinstance(error, FileNotFoundError) else _CANNOT_RUN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
