"""A folder for temporary files that is on storage: in many systems /tmp is memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

_IN_MEMORY = ("tmpfs", "ramfs")
_LASTING = "/var/tmp"  # on storage by the Filesystem Hierarchy Standard, 5.15


def temporary_folder(proc: Path = Path("/proc")) -> Path | None:
    """Return the folder for temporary files (TMPDIR), or /var/tmp if that is memory; None if both
    are, or none can be written to."""
    try:
        folders = [tempfile.gettempdir(), _LASTING]
    except FileNotFoundError:
        return None
    for folder in map(Path, folders):
        if os.access(folder, os.W_OK) and not is_memory(folder, proc):
            return folder
    return None


def is_memory(folder: Path, proc: Path = Path("/proc")) -> bool:
    """Return whether files in a folder take memory. Raises FileNotFoundError."""
    return file_system(folder, proc) in _IN_MEMORY


def file_system(path: Path, proc: Path = Path("/proc")) -> str | None:
    """Return the file system type of a path ("ext4"), or None if the system does not tell."""
    number = path.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    try:
        lines = (proc / "self" / "mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == device:
            return rest.split()[0]
    return None
