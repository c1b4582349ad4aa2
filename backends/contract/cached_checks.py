"""Disk cache of the results of checks of this machine's arithmetic."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from offload.process.disk_cache import cache_folder, load_cached, save_cached

_VERSION = 4  # of the checks; results of another version are not used
_UNKNOWN: Any = "unknown"
_SETTINGS = ("ATEN_", "DNNL_", "GGML_", "GOMP_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_")
"""Prefixes of environment variables that change the kernels of libraries or their numbers of
threads (MKL_CBWR=COMPATIBLE, OMP_THREAD_LIMIT=1)."""
_IRRELEVANT_VARIABLES = frozenset(
    ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "GGML_NO_BACKTRACE", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
)
"""Variables without effect on results: waiting threads, ggml's backtraces, size of a kernel cache.
They are set when ggml is loaded or a checkpoint is opened, which may be before or after this."""


class CachedChecks:
    """Results of checks by name, read from the disk cache or computed now.

    A result is a number, or None if the check failed.

    Args:
        libraries: see `machine`, whose result is the key of the disk cache.
        valid: numbers that a check may return; a cached one that is none of these is not used.
    """

    def __init__(self, libraries: str, valid: Collection[int]) -> None:
        self._path = cache_folder() / f"exact-{machine(libraries)}.json"
        cached = load_cached(self._path)
        self._results: dict[str, Any] = cached if isinstance(cached, dict) else {}
        self._valid = valid
        self._is_changed = False

    def find(self, name: str, check: Callable[[], int | None]) -> int | None:
        result: int | None = self._results.get(name, _UNKNOWN)
        if result is None or (type(result) is int and result in self._valid):
            return result
        result = self._results[name] = check()
        self._is_changed = True
        return result

    def save(self) -> None:
        """Write new results to the disk cache."""
        if self._is_changed:
            save_cached(self._path, self._results, "whether this machine's products are exact")
            self._is_changed = False


def machine(libraries: str) -> str:
    """Return a digest of everything that the bits of a sum depend on.

    libraries: versions of the libraries that compute, and their threads.
    """
    described = f"{_VERSION} {libraries} {processor()} {_settings()}"
    return hashlib.sha256(described.encode()).hexdigest()[:16]


def _settings() -> str:
    names = sorted(name for name in os.environ if name.startswith(_SETTINGS))
    names = [name for name in names if name not in _IRRELEVANT_VARIABLES]
    return " ".join(f"{name}={os.environ[name]}" for name in names)


def processor() -> str:
    """Return the processor's name and its features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = ("model name", "flags", "CPU part", "Features")
    first = {line.split("\t")[0].split(":")[0].strip(): line for line in reversed(lines)}
    return " ".join(first[name] for name in fields if name in first)
