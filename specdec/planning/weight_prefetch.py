"""Weight prefetch: read the weights that the last start with the same options had in memory, while
libraries are being imported.

Only for checkpoints that run on the CPU: torch and transformers take seconds, llama.cpp does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from backends.contract.source import ModelSource
from offload.errors import SpecdecError
from offload.formats.checkpoint import WeightIndex
from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.process.disk_cache import cache_folder, load_cached, save_cached
from offload.ring.weight_prefetch import WeightPrefetch, WeightSelection
from offload.units import MIB, Progress
from specdec.models.names import resolve_model
from specdec.planning.run_plan import RunPlan
from specdec.run_options import CPU, RunOptions

_SAME_BASE_BYTES = 16 * MIB
"""Tolerance of a process's base memory: it differs by half a megabyte from one start to the next,
and each reader may have begun a huge page that is not full."""


@dataclass(frozen=True)
class Prefetch:
    """Weights that are being read, and the base memory that they were planned with."""

    weights: WeightPrefetch
    base_bytes: int

    def base(self, taken_bytes: int, read_bytes: int) -> int:
        """Return the process's base memory: `taken_bytes` without the prefetched `read_bytes`.

        Within the tolerance, the value of the last start is returned, so that the plan is the same.
        """
        result = taken_bytes - read_bytes
        is_same = abs(result - self.base_bytes) <= _SAME_BASE_BYTES
        return self.base_bytes if is_same else result


@contextmanager
def begin_prefetch(
    options: RunOptions, total_bytes: int, progress: Progress | None
) -> Iterator[Prefetch | None]:
    """Read the weights that the last start with these options had in memory, if there was one; free
    those that nobody took at the end of the context."""
    weight_prefetch = None
    with suppress(SpecdecError, OSError):  # whoever opens the model says what is wrong
        weight_prefetch = _begin(options, total_bytes, progress)
    try:
        yield weight_prefetch
    finally:
        if weight_prefetch is not None:
            weight_prefetch.weights.close()


def _begin(options: RunOptions, total_bytes: int, progress: Progress | None) -> Prefetch | None:
    directory = resolve_model(options.model)
    if options.device != CPU or not directory.is_dir():
        return None
    cached = load_cached(_record(options, directory))
    if cached is None:
        return None
    index = WeightIndex.from_directory(directory)
    try:
        selection, base_bytes = _selection(cached, index), int(cached["base_bytes"])
        budget_bytes, needed_bytes = int(cached["budget_bytes"]), int(cached["needed_bytes"])
    except (KeyError, TypeError, ValueError):  # names of another checkpoint or version
        return None
    is_as_before = budget_bytes == total_bytes or not selection.n_slots
    if not is_as_before or needed_bytes > total_bytes:
        return None
    return Prefetch(WeightPrefetch(selection, index.check_unchanged, progress), base_bytes)


def remember_prefetch(options: RunOptions, plan: RunPlan, target: ModelSource) -> None:
    """Save the names of the weights in memory to the disk cache, for the next start to prefetch."""
    non_layer = target.prefetch_records
    if non_layer is None or plan.device != CPU:
        return
    path = _record(options, target.path)
    placement, parts = plan.placement, dict(plan.parts)
    value = {
        "budget_bytes": plan.budget_bytes,
        "needed_bytes": plan.budget_bytes - parts["available"],
        "base_bytes": parts["base"],
        "non_layer": [record.name for record in non_layer],
        "layers": [[record.name for record in layer.tensors] for layer in placement.layers],
        "resident": [sorted(layer.resident) for layer in placement.layers],
        "n_slots": placement.n_slots,
        "n_readers": options.io_threads,
    }
    if load_cached(path) != value:
        save_cached(path, value, "what to read first")


def _selection(cached: Mapping[str, Any], index: Mapping[str, TensorRecord]) -> WeightSelection:
    layers = zip(cached["layers"], cached["resident"], strict=True)
    return WeightSelection(
        tuple(index[name] for name in cached["non_layer"]),
        tuple(
            LayerWeights(tuple(index[name] for name in names), frozenset(resident))
            for names, resident in layers
        ),
        cached["n_slots"],
        cached["n_readers"],
    )


def _record(options: RunOptions, directory: Path) -> Path:
    key = f"{options} {directory.resolve()}"
    return cache_folder() / f"weights-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
