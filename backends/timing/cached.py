"""Disk cache of measured compute curves: measuring takes seconds, and starts should not.

Curves beside reads are neither cached nor loaded under a read limit (`offload.storage.read_limit`),
which is no property of the machine. Curves timed while other programs computed are not cached.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from backends.contract.cached_checks import processor
from backends.contract.curve import ComputeCurve
from offload.process.disk_cache import (
    cache_folder,
    load_cached_measurement,
    save_cached_measurement,
)
from offload.process.other_processes import beside_other_processes
from offload.storage.read_limit import read_limit_in_force

_PREFIX = "times-"


def forget_curves() -> None:
    """Delete the cached curves of all models, so that they are measured again."""
    for path in cache_folder().glob(f"{_PREFIX}*.json"):
        path.unlink(missing_ok=True)


def cached_curve(
    what: str, measure: Callable[[], ComputeCurve], reading: Path | None = None
) -> ComputeCurve:
    """Return `measure`'s result on this machine, at most a month old, or call it now.

    Args:
        what: key, all that the times depend on: versions, threads, shapes.
        reading: a file that is read meanwhile; its device is a part of the key.
    """
    if reading is not None and read_limit_in_force(reading) is not None:
        return measure()
    device = None if reading is None else reading.stat().st_dev
    machine = f"{what} {device} {os.cpu_count()} {processor()}"
    digest = hashlib.sha256(machine.encode()).hexdigest()[:16]
    path = cache_folder() / f"{_PREFIX}{digest}.json"
    cached = _read(load_cached_measurement(path) or {})
    if cached is not None:
        return cached
    with beside_other_processes() as remaining:
        curve = measure()
    if not remaining.are_busy:
        kinds = {
            "rows": curve.num_tokens,
            "alone": curve.alone,
            "beside_reads": curve.beside_reads,
        }
        save_cached_measurement(path, kinds, "how fast this machine computes")
    return curve


def _read(figure: Mapping[str, Any]) -> ComputeCurve | None:
    """Return the curve of a cached value, or None if it is not a curve of seconds."""
    try:
        rows, *kinds = (tuple(figure[key]) for key in ("rows", "alone", "beside_reads"))
        alone, beside_reads = (tuple(map(float, kind)) for kind in kinds)
        curve = ComputeCurve(tuple(map(int, rows)), alone, beside_reads)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    is_sane = all(0.0 < seconds < 3600.0 for seconds in (*alone, *beside_reads))
    return curve if is_sane else None
