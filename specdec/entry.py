"""Where the `specdec` command begins: Ctrl-C is one line, also while modules are being imported.

This module and `specdec/__init__.py` import next to nothing, so that it is so from the start.
"""

from __future__ import annotations

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence

_INTERRUPTED = 130  # 128 + SIGINT, as shells report it
_LINE = b"specdec: interrupted\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    # A KeyboardInterrupt inside of an import ends in a traceback, or in a library's own error.
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default:
        signal.signal(signal.SIGINT, _leave)
    from specdec.cli import main as run
    from specdec.dropped_interrupts import send_dropped_interrupts_again

    try:
        if is_default:
            send_dropped_interrupts_again()
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return run(argv)
    except KeyboardInterrupt:  # before or after the command itself, which tells its own
        _tell()
        return _INTERRUPTED


def _leave(*_: object) -> None:
    _tell()
    os._exit(_INTERRUPTED)


def _tell() -> None:
    try:  # noqa: SIM105  # nothing is imported here that takes its time
        os.write(2, _LINE)
    except OSError:  # stderr is closed
        pass
