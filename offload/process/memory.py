"""Memory limit and memory use of this process.

In a container the machine's memory is the host's; the process is killed at the limit of its memory
cgroup or of one of the parents. Source: cgroup-v1/memory.rst and cgroup-v2.rst of Linux.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_UNLIMITED_BYTES = 2**60  # version 1 says "no limit" with a number close to 2^63
_peak_before_bytes = 0
"""Maximum of the peaks that `recent_peak_rss` has reset."""
_companion_bytes = 0
"""Resident bytes of a process that shares this one's memory budget."""
_LIMIT_FILES = {
    1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"),
    2: ("memory.max", "memory.high"),  # above `high` the kernel throttles until nothing moves
}


@dataclass(frozen=True)
class MemoryLimit:
    """The memory this process may use, and what sets that limit."""

    n_bytes: int
    source: str  # "cgroup v1 /path", "cgroup v2 /path" or "machine"


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of this process."""

    rss_bytes: int  # in RAM, file mappings included
    anonymous_bytes: int  # in RAM and not backed by a file: only swapping or killing gets it back
    swap_bytes: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class CgroupLocation:
    """This process's place in one cgroup hierarchy."""

    version: int  # 1 or 2
    mount: Path
    directory: Path  # `mount` or below it

    def upwards(self) -> list[Path]:
        """Return the process's own cgroup, then its parents."""
        above = [p for p in self.directory.parents if p == self.mount or self.mount in p.parents]
        return [self.directory, *above]


def count_companion(n_bytes: int) -> None:
    """Count the memory of another process, such as the server of this engine, in our budget."""
    global _companion_bytes
    _companion_bytes = n_bytes


def companion_bytes() -> int:
    """Return the bytes of another process that count in our budget."""
    return _companion_bytes


def memory_limit(proc: Path = _PROC) -> MemoryLimit:
    """Return the smallest limit of the cgroups of this process, or the machine's memory."""
    best = MemoryLimit(_machine_bytes(proc), "machine")
    for location in memory_cgroups(proc):
        for directory in location.upwards():
            for limit in _limits(directory, location.version):
                if limit < best.n_bytes:
                    best = MemoryLimit(limit, f"cgroup v{location.version} {directory}")
    return best


def memory_cgroups(proc: Path = _PROC) -> list[CgroupLocation]:
    """Return `controller_cgroups` of the memory controller."""
    return controller_cgroups("memory", proc)


def controller_cgroups(controller: str, proc: Path = _PROC) -> list[CgroupLocation]:
    """Return this process's place in a controller's version 1 hierarchy and in version 2.

    controller: its version 1 name.
    """
    mounts: dict[int, tuple[str, Path]] = {}
    for line in _lines(proc / "self" / "mountinfo"):
        fields, _, mounted = line.partition(" - ")
        kind, _, options = (mounted.split() + ["", "", ""])[:3]
        if kind == "cgroup2" or (kind == "cgroup" and controller in options.split(",")):
            root, point = (_unescape(field) for field in fields.split()[3:5])
            mounts.setdefault(2 if kind == "cgroup2" else 1, (root, Path(point)))
    result = []
    for line in _lines(proc / "self" / "cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        version = 2 if (number, controllers) == ("0", "") else 1
        if version in mounts and (version == 2 or controller in controllers.split(",")):
            root, mount = mounts[version]
            result.append(CgroupLocation(version, mount, _locate(mount, root, path)))
    return result


def process_memory(proc: Path = _PROC) -> ProcessMemory:
    """Return this process's memory, from /proc/self/status (psutil where there is none)."""
    status = dict(line.partition(":")[::2] for line in _lines(proc / "self" / "status"))

    def n_bytes(key: str) -> int:
        match = re.match(r"\s*(\d+) kB", status.get(key, ""))
        return int(match.group(1)) * 1024 if match else 0

    if "VmRSS" in status:
        peak_bytes = max(n_bytes("VmHWM"), _peak_before_bytes if proc == _PROC else 0)
        return ProcessMemory(n_bytes("VmRSS"), n_bytes("RssAnon"), n_bytes("VmSwap"), peak_bytes)
    import psutil

    info = psutil.Process().memory_info()
    peak_bytes = int(getattr(info, "peak_wset", info.rss))
    return ProcessMemory(int(info.rss), int(info.rss), 0, peak_bytes)


def reset_peak_rss() -> bool:
    """Reset the peak to what is in memory now; return False if the system cannot.

    For memory that was mapped for a while but is not the process's own: file pages in the page
    cache count in a peak as long as they are mapped. Source: proc_pid_clear_refs(5).
    """
    global _peak_before_bytes
    _peak_before_bytes = 0
    return _reset_peak()


def recent_peak_rss() -> int:
    """Return the peak since the last call or the start; `process_memory` still has the overall."""
    global _peak_before_bytes
    peak_bytes = _peak_rss()
    _peak_before_bytes = max(_peak_before_bytes, peak_bytes)
    _reset_peak()
    return peak_bytes


def _peak_rss() -> int:
    for line in _lines(_PROC / "self" / "status"):
        if match := re.match(r"VmHWM:\s*(\d+) kB", line):
            return int(match.group(1)) * 1024
    return process_memory().rss_bytes


def _reset_peak() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _machine_bytes(proc: Path) -> int:
    for line in _lines(proc / "meminfo"):
        if match := re.match(r"MemTotal:\s*(\d+) kB", line):
            return int(match.group(1)) * 1024
    import psutil

    return int(psutil.virtual_memory().total)


def _limits(directory: Path, version: int) -> list[int]:
    """Return the limits set at `directory`, without those that are absent or say "no limit"."""
    contents = ["".join(_lines(directory / name)) for name in _LIMIT_FILES[version]]
    if version == 1:
        # Includes parents that a container cannot see.
        for line in _lines(directory / "memory.stat"):
            key, _, value = line.partition(" ")
            if key in ("hierarchical_memory_limit", "hierarchical_memsw_limit"):
                contents.append(value)
    values = [int(text) for text in contents if text.strip().isdecimal()]  # version 2 says "max"
    return [value for value in values if value < _UNLIMITED_BYTES]


def _locate(mount: Path, root: str, path: str) -> Path:
    """Return the directory of cgroup `path` under `mount`, which shows the tree from `root` on."""
    if root != "/" and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    directory = mount / path.lstrip("/")
    # A container may see a path that is not its own; its cgroup is then the mount itself.
    return directory if ".." not in directory.parts and directory.is_dir() else mount


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(errors="replace").splitlines()
    except OSError:
        return []


def _unescape(field: str) -> str:
    """Decode the octal escapes of blanks and backslashes in mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)
