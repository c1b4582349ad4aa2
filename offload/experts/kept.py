"""How often a model's experts are found in a cache: measured while it runs, and kept for its plans.

With a share s of all experts held, exp(-x s) of those asked for are missed; x is the model's, as
far as known. So what was measured with one budget tells something of another. It is that of the
files as they were then: other weights in their place are another model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offload.experts.readers import ExpertStats
from offload.process.remembered import cache_folder, recall, remember
from offload.residency.experts import ASSUMED_DECAY, ExpertRoom, LayerExperts

_LEAST_ASKED = 2000
"""Experts asked for: fewer say little."""
_LEAST, _MOST = 0.2, 50.0


def expected_decay(layers: Sequence[LayerExperts | None]) -> float:
    """Measured, or assumed."""
    kept = recall(_record(layers)) if any(layers) else None
    found = kept.get("decay_of_misses") if isinstance(kept, dict) else None
    if not isinstance(found, float) or not _LEAST <= found <= _MOST:
        return ASSUMED_DECAY
    return found


def keep_decay(room: ExpertRoom, stats: ExpertStats) -> None:
    """Of passes of one row, once all slots were in use."""
    share = room.n_slots / room.n_experts
    if stats.n_asked_full < _LEAST_ASKED or room.holds_all:
        return
    missed = max(stats.n_asked_full - stats.n_hits_full, 1) / stats.n_asked_full
    decay = min(_MOST, max(_LEAST, -math.log(missed) / share))
    kept = {"decay_of_misses": decay}
    with suppress(OSError):  # the file is gone
        remember(_record(room.layers), kept, "how often experts are in memory")


def _record(layers: Sequence[LayerExperts | None]) -> Path:
    own = [layer for layer in layers if layer is not None]
    paths = {r.path for layer in own for tensors in layer.tensors for r in tensors}
    files = []
    for path in sorted(path.resolve() for path in paths):
        status = path.stat()
        files.append((str(path), status.st_size, status.st_mtime_ns))
    key = f"{files} {[len(x.tensors) if x else 0 for x in layers]}"
    return cache_folder() / f"experts-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
