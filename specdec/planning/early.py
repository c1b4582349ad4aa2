"""What the last start with the same options had in memory, so that the next one can read it while
libraries are being imported.

Only for checkpoints that the CPU computes: torch and transformers take seconds, llama.cpp does not.
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
from offload.process.remembered import cache_folder, recall, remember
from offload.residency.placement import LayerWeights
from offload.ring.early import EarlyWeights, WantedWeights
from offload.units import MIB, Progress
from specdec.models.names import resolve_model
from specdec.planning.run_plan import RunPlan
from specdec.run_options import CPU, RunOptions

_SAME_BASE_BYTES = 16 * MIB
"""What a process takes by itself differs by half a megabyte from one start to the next, and each
reader may have begun a huge page that is not full."""


@dataclass(frozen=True)
class Early:
    """Weights that are being read, and what the process took when they were planned."""

    weights: EarlyWeights
    base_bytes: int

    def base(self, taken_bytes: int, read_bytes: int) -> int:
        """Of the process, which takes so much now, so much of it for what was read early.

        As it was planned with before, if it is about that: then the plan is the same.
        """
        found = taken_bytes - read_bytes
        is_same = abs(found - self.base_bytes) <= _SAME_BASE_BYTES
        return self.base_bytes if is_same else found


@contextmanager
def begin_early(
    options: RunOptions, total_bytes: int, progress: Progress | None
) -> Iterator[Early | None]:
    """Read what the last start with these options had in memory, if there was one; at the end of
    the context what nobody took is given back."""
    early = None
    with suppress(SpecdecError, OSError):  # whoever opens the model says what is wrong
        early = _begin(options, total_bytes, progress)
    try:
        yield early
    finally:
        if early is not None:
            early.weights.close()


def _begin(options: RunOptions, total_bytes: int, progress: Progress | None) -> Early | None:
    directory = resolve_model(options.model)
    if options.device != CPU or not directory.is_dir():
        return None
    kept = recall(_record(options, directory))
    if kept is None:
        return None
    index = WeightIndex.from_directory(directory)
    try:
        wanted, base_bytes = _wanted(kept, index), int(kept["base_bytes"])
        budget_bytes, needed_bytes = int(kept["budget_bytes"]), int(kept["needed_bytes"])
    except (KeyError, TypeError, ValueError):  # other names than today's, or of another version
        return None
    is_as_before = budget_bytes == total_bytes or not wanted.n_slots
    if not is_as_before or needed_bytes > total_bytes:
        return None
    return Early(EarlyWeights(wanted, index.check_unchanged, progress), base_bytes)


def remember_early(options: RunOptions, plan: RunPlan, target: ModelSource) -> None:
    """Let the next start read what this one has in memory."""
    outer = target.early_records
    if outer is None or plan.device != CPU:
        return
    path = _record(options, target.path)
    residency, parts = plan.residency, dict(plan.parts)
    value = {
        "budget_bytes": plan.budget_bytes,
        "needed_bytes": plan.budget_bytes - parts["available"],
        "base_bytes": parts["base"],
        "outer": [record.name for record in outer],
        "layers": [[record.name for record in layer.tensors] for layer in residency.layers],
        "resident": [sorted(layer.resident) for layer in residency.layers],
        "n_slots": residency.n_slots,
        "n_readers": options.io_threads,
    }
    if recall(path) != value:
        remember(path, value, "what to read first")


def _wanted(kept: Mapping[str, Any], index: Mapping[str, TensorRecord]) -> WantedWeights:
    layers = zip(kept["layers"], kept["resident"], strict=True)
    return WantedWeights(
        tuple(index[name] for name in kept["outer"]),
        tuple(
            LayerWeights(tuple(index[name] for name in names), frozenset(resident))
            for names, resident in layers
        ),
        kept["n_slots"],
        kept["n_readers"],
    )


def _record(options: RunOptions, directory: Path) -> Path:
    key = f"{options} {directory.resolve()}"
    return cache_folder() / f"weights-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
