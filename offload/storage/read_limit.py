"""Slower storage: a read limit that the kernel enforces for one process and its children.

A cgroup can limit its processes to so many bytes a second of one block device: version 1 by
`blkio.throttle.read_bps_device`, version 2 by `io.max`. Reads with O_DIRECT are all counted, others
if they reach the device. Sources: cgroup-v1/blkio-controller.rst and cgroup-v2.rst of Linux.

    reads = ReadLimit(path_of_the_weights, bytes_per_second=500_000_000)
    run_limited(argv, Limits(memory_bytes, reads=reads))
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from offload.process.cgroup import MemoryCgroup
from offload.process.cgroup_files import CgroupUnavailable, make_cgroup, remove_cgroup, write_cgroup
from offload.process.memory import controller_cgroups
from offload.storage.direct_io import StorageError

_V1_FILE = "blkio.throttle.read_bps_device"
_V2_FILE = "io.max"
_SYS = Path("/sys")
_PROC = Path("/proc")


@dataclass(frozen=True)
class ReadLimit:
    """The storage that holds a file, and the limit of its read bandwidth."""

    path: Path
    bytes_per_second: int

    def __post_init__(self) -> None:
        if self.bytes_per_second <= 0:
            raise ValueError(f"a limit on reading is positive, not {self.bytes_per_second} bytes/s")

    @contextmanager
    def applied(self, group: MemoryCgroup, *, proc: Path = _PROC) -> Iterator[tuple[Path, ...]]:
        """Set the limit for the processes of `group`, for as long as the block runs.

        Yields the files that a process must write its id to besides that of `group`: with version
        1 the limit has a cgroup of its own.

        Raises:
            CgroupUnavailable: no rights, no such controller, or a file on no block device.
        """
        device = block_device(self.path)
        if device is None:
            raise CgroupUnavailable(
                f"cannot limit the reading of {self.path}: it is on no block device of its own "
                "(a network, memory or overlay file system); put it on a disk"
            )
        for location in controller_cgroups("blkio", proc):
            if location.version == 1:
                path = make_cgroup(location.directory)
                try:
                    write_cgroup(path / _V1_FILE, f"{device} {self.bytes_per_second}")
                    yield (path / "cgroup.procs",)
                finally:
                    remove_cgroup(path)
                return
        if group.version == 2:
            _enable_io(group.path.parent)
            write_cgroup(group.path / _V2_FILE, f"{device} rbps={self.bytes_per_second}")
            yield ()
            return
        raise CgroupUnavailable("cannot limit reading: no cgroup has the controller for block I/O")


def block_device(path: Path, sys: Path = _SYS) -> str | None:
    """Return "MAJOR:MINOR" of the whole disk that holds a file, or None if there is none, or its
    entry below /sys is hidden, as in some containers."""
    try:
        number = path.stat().st_dev
    except OSError as error:
        raise StorageError(f"cannot open {path}: {error.strerror or error}") from error
    name = f"{os.major(number)}:{os.minor(number)}"
    device = sys / "dev" / "block" / name
    if os.major(number) == 0:
        return None
    try:
        if (device / "partition").exists():  # limits are the whole disk's
            return (device.resolve().parent / "dev").read_text().strip()
        return name if device.exists() else None
    except OSError:
        return None


def read_limit_in_force(path: Path, proc: Path = _PROC) -> int | None:
    """Return this process's limit on reading the file's storage in bytes/s; None without limit.

    A container may have such a limit, too.
    """
    device = block_device(path)
    if device is None:
        return None
    limits: list[int] = []
    for location in controller_cgroups("blkio", proc):
        # Version 1 uses a process's own cgroup only.
        directories = [location.directory] if location.version == 1 else location.upwards()
        name = _V1_FILE if location.version == 1 else _V2_FILE
        for directory in directories:
            limits += _limits(directory / name, device)
    return min(limits, default=None)


def _limits(file: Path, device: str) -> list[int]:
    """Parse the limits in lines "254:0 500000000" or "254:0 rbps=500000000 wbps=max"."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return []
    words = [word for line in lines if line.split()[:1] == [device] for word in line.split()[1:]]
    values = [word.removeprefix("rbps=") for word in words]
    return [int(value) for value in values if value.isdecimal()]


def _enable_io(parent: Path) -> None:
    control = parent / "cgroup.subtree_control"
    if "io" not in control.read_text().split():
        write_cgroup(control, "+io")
