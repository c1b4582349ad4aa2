"""Entry point of the commands: Ctrl-C prints one line, also while modules are being imported.

This module and `specdec/__init__.py` import next to nothing, so that this holds from the start.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Run = Callable[[Sequence[str] | None], int]

_USER_ERROR = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `specdec` command line and return its exit code."""

    def load() -> Run:
        from specdec.cli.app import main as run

        return run

    return run_command("specdec", load, argv)


def bench_main(argv: Sequence[str] | None = None) -> int:
    """Run the `specdec-bench` command line and return its exit code.

    The script starts here and not in `bench`, whose name is other programs' too: what is in its
    place is said in one line.
    """
    from importlib import import_module

    from specdec import check_packages

    try:
        check_packages("bench")
    except ImportError as error:
        _tell(f"specdec-bench: error: {error}\n".encode())
        return _USER_ERROR
    return int(import_module("bench.__main__").main(argv))


def run_command(name: str, load: Callable[[], Run], argv: Sequence[str] | None) -> int:
    """Import a command line by `load`, run it, and return its exit code.

    Args:
        name: command name, for the line about Ctrl-C.
    """
    # A KeyboardInterrupt inside of an import ends in a traceback, or in a library's own error.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    line = f"{name}: interrupted\n".encode()

    def leave(*_: object) -> None:
        _tell(line)
        os._exit(_INTERRUPTED)

    if is_default:
        signal.signal(signal.SIGINT, leave)
    run = load()
    try:
        if is_default:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = run(argv)
        # No garbage collection at exit: it took a second after torch.
        gc.freeze()
        if code == _INTERRUPTED:  # a thread may still be importing: nobody waits for it
            _flush()
            os._exit(code)
        return code
    except KeyboardInterrupt:  # before or after the command itself, which prints its own line
        _tell(line)
        return _INTERRUPTED


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:  # noqa: SIM105  # nothing is imported here that takes its time
            stream.flush()
        except (OSError, ValueError, AttributeError):  # it is closed, or was never there
            pass


def _tell(line: bytes) -> None:
    try:  # noqa: SIM105  # nothing is imported here that takes its time
        os.write(2, line)
    except OSError:  # stderr is closed
        pass
