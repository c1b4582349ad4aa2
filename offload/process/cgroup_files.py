"""Directories and control files of cgroups: create, write and remove them."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import time
from contextlib import suppress
from pathlib import Path

from offload.errors import SpecdecError
from offload.process.memory import CgroupLocation

logger = logging.getLogger(__name__)

_REMOVE_SECONDS = 2.0  # a cgroup stays busy for a moment after its last process ended
_OUR_NAME = re.compile(r"specdec-(?P<creator>\d{1,9})-[0-9a-f]{8}")


class CgroupUnavailable(SpecdecError):
    """No cgroup can be made or written here; the message says what is missing."""


def usable_parent(location: CgroupLocation) -> Path:
    """Return the directory to make a memory cgroup in. Raises CgroupUnavailable."""
    if location.version == 1:
        return location.directory
    directories = location.upwards()
    if not any("memory" in read_words(d / "cgroup.controllers") for d in directories):
        raise CgroupUnavailable(f"the memory controller is not enabled in {location.directory}")
    for directory in directories:
        # A cgroup with processes cannot hand controllers down, unless it is the root.
        if _hands_memory_down(directory) and os.access(directory, os.W_OK):
            return directory
    raise CgroupUnavailable(
        f"no writable cgroup from {location.directory} upwards hands the memory controller down"
    )


def _hands_memory_down(directory: Path) -> bool:
    control = directory / "cgroup.subtree_control"
    is_offered = "memory" in read_words(directory / "cgroup.controllers")
    if is_offered and "memory" not in read_words(control):
        try:
            write_cgroup(control, "+memory")
        except CgroupUnavailable:
            return False
    return "memory" in read_words(control)


def make_cgroup(parent: Path) -> Path:
    """Make a cgroup directory named after this process; remove those that dead processes left.

    Raises:
        CgroupUnavailable: no permission.
    """
    for path in parent.glob("specdec-*"):
        made = _OUR_NAME.fullmatch(path.name)
        if made is not None and not _is_running(int(made["creator"])):
            with suppress(OSError):  # one with a process is busy, and stays
                path.rmdir()
    path = parent / f"specdec-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        path.mkdir()
    except OSError as error:
        raise CgroupUnavailable(f"cannot create {path}: {error.strerror}") from error
    return path


def _is_running(pid: int) -> bool:
    """Return whether this process id exists; another process may have taken it by now."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process
        return True
    return True


def read_words(path: Path) -> list[str]:
    """Return the words of a control file; none if it cannot be read."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def remove_cgroup(path: Path) -> None:
    """Remove a cgroup whose processes have ended or are about to."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                logger.warning("cannot remove the cgroup %s: %s", path, error.strerror)
                return
        time.sleep(0.01)


def write_cgroup(path: Path, value: int | str) -> None:
    """Write to a control file. Raises CgroupUnavailable."""
    try:
        path.write_text(f"{value}\n")
    except OSError as error:
        raise CgroupUnavailable(f"cannot write {value} to {path}: {error.strerror}") from error
