"""What checks of this machine's arithmetic found, kept from run to run."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from offload.process.disk_cache import cache_folder, load_cached, save_cached

_VERSION = 4  # of the checks: what another one found is found out again
_UNKNOWN: Any = "unknown"
_SETTINGS = ("ATEN_", "DNNL_", "GGML_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
"""Beginnings of environment variables that make libraries take other kernels, or other numbers of
threads (MKL_CBWR=COMPATIBLE, OMP_THREAD_LIMIT=1)."""
_DECIDE_NOTHING = frozenset(
    ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GGML_NO_BACKTRACE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
)
"""How threads wait for work, what ggml says as it ends a process, and how many kernels are kept.
They are set as ggml is loaded, or a checkpoint is opened, which may be before or after this."""


class CachedChecks:
    """Results of checks by name: remembered ones, and those that are run now.

    A result is a number, or None where the check failed.

    Args:
        libraries: see `machine`, which is the key.
        valid: numbers that a check may find; a remembered one that is none of these is not used.
    """

    def __init__(self, libraries: str, valid: Collection[int]) -> None:
        self._path = cache_folder() / f"exact-{machine(libraries)}.json"
        known = load_cached(self._path)
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}
        self._valid = valid
        self._is_changed = False

    def find(self, name: str, check: Callable[[], int | None]) -> int | None:
        result: int | None = self._known.get(name, _UNKNOWN)
        if result is None or (type(result) is int and result in self._valid):
            return result
        result = self._known[name] = check()
        self._is_changed = True
        return result

    def save(self) -> None:
        """Keep what was found out."""
        if self._is_changed:
            save_cached(self._path, self._known, "whether this machine's products are exact")
            self._is_changed = False


def machine(libraries: str) -> str:
    """A short name of all that decides over a sum's bits.

    libraries: versions of what computes, and its threads.
    """
    described = f"{_VERSION} {libraries} {processor()} {_settings()}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _settings() -> str:
    names = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    names = [name for name in names if name not in _DECIDE_NOTHING]
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def processor() -> str:
    """Its name and what it can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    requested = ("model name", "flags", "CPU part", "Features")
    first = {line.split("\t")[0].split(":")[0].strip(): line for line in reversed(lines)}
    return " ".join(first[name] for name in requested if name in first)
