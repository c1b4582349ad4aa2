"""Unfinished output: it lies beside its destination under a hidden name, until it is complete."""

from __future__ import annotations

import glob
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from offload.process.signals import handling


@contextmanager
def unfinished(destination: Path) -> Iterator[Path]:
    """Yield a path beside `destination`, for the block to make a file or folder of and to rename.

    Removes what is left there: after the block, also if Ctrl-C, SIGTERM or SIGHUP ends it, and
    before the block what killed processes have left. Folders above it that the block makes stay
    only if they are not empty.
    """
    missing = [path for path in destination.parents if not path.exists()]  # the innermost first
    hidden = f".{destination.name}.partial-"
    for path in destination.parent.glob(f"{glob.escape(hidden)}*"):
        if _is_dead(path.name.removeprefix(hidden)):
            _remove(path)
    partial = destination.with_name(f"{hidden}{os.getpid()}")
    _remove(partial)  # left by an earlier process with our id
    with handling((signal.SIGTERM, signal.SIGHUP), _end):
        try:
            yield partial
        finally:
            _remove(partial)
            with suppress(OSError):  # not made, or the destination is in it
                for path in missing:
                    path.rmdir()


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _is_dead(process_id: str) -> bool:
    """Return whether no process has this id; False for what is no id."""
    with suppress(ValueError, OverflowError, PermissionError):  # the last: another user's process
        try:
            os.kill(int(process_id), 0)
        except ProcessLookupError:
            return True
    return False


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
