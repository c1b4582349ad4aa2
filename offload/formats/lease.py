"""A file lease: for a moment no other process may write or truncate the file.

Accessing a truncated part of a mapped file would end the process (SIGBUS).
"""

from __future__ import annotations

import errno
import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class FileInUse(OSError):
    """Another process has opened the file for writing."""


@contextmanager
def read_lease(descriptor: int) -> Iterator[None]:
    """Make processes that open the file for writing, or truncate it, wait until the block ends.

    The kernel lets them go on after /proc/sys/fs/lease-break-time, 45 s. Has no effect on file
    systems without leases and on files of other users. Source: fcntl(2), "Leases".

    Raises FileInUse.
    """
    is_leased = _take(descriptor)
    try:
        yield
    finally:
        if is_leased:
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)


def _take(descriptor: int) -> bool:
    try:
        # The kernel signals us when a writer waits: by default SIGIO, which kills; SIGURG does not.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise FileInUse(error.errno, "another program has opened it for writing") from error
        return False
    return True
