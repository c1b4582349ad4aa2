"""A file that nobody else may write or cut for a moment.

What was cut off of a mapped file would end the process (SIGBUS) that looks at it.
"""

from __future__ import annotations

import errno
import fcntl
import signal
from collections.abc import Iterator
from contextlib import contextmanager


class FileInUse(OSError):
    """Somebody has opened the file for writing."""


@contextmanager
def read_lease(descriptor: int) -> Iterator[None]:
    """Who opens the file for writing, or cuts it, waits until the context ends.

    The kernel lets them go on after /proc/sys/fs/lease-break-time, 45 s. File systems without
    leases and files of other users are left as they are. Source: fcntl(2), "Leases".

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
        # Of who waits a signal tells: SIGIO, which ends a process, or one that nobody heeds.
        fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise FileInUse(error.errno, "another program has opened it for writing") from error
        return False
    return True
