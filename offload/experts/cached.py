"""The hit rate of a model's experts in a cache: measured while it runs, and cached for its plans.

With a share s of all experts cached, exp(-x s) of those asked for are missed; x belongs to the
model, as far as known. So a measurement with one budget helps with another. It is valid for the
files as they were: other weights in their place are another model.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from offload.experts.readers import ExpertStats
from offload.placement.experts import ASSUMED_DECAY, ExpertCachePlan, LayerExperts
from offload.process.disk_cache import cache_folder, load_cached, save_cached

_MIN_ASKED = 2000
"""Minimum number of experts asked for: fewer say little."""
_MIN, _MAX = 0.2, 50.0


def expected_decay(layers: Sequence[LayerExperts | None]) -> float:
    """Return the measured decay of misses, or the assumed one."""
    cached = load_cached(_record(layers)) if any(layers) else None
    result = cached.get("decay_of_misses") if isinstance(cached, dict) else None
    if not isinstance(result, float) or not _MIN <= result <= _MAX:
        return ASSUMED_DECAY
    return result


def keep_decay(expert_cache: ExpertCachePlan, stats: ExpertStats) -> None:
    """Save the decay measured in passes of one token, once all slots were in use."""
    share = expert_cache.n_slots / expert_cache.n_experts
    if stats.n_asked_full < _MIN_ASKED or expert_cache.holds_all:
        return
    missed = max(stats.n_asked_full - stats.n_hits_full, 1) / stats.n_asked_full
    decay = min(_MAX, max(_MIN, -math.log(missed) / share))
    cached = {"decay_of_misses": decay}
    with suppress(OSError):  # the file is gone
        save_cached(_record(expert_cache.layers), cached, "how often experts are in memory")


def _record(layers: Sequence[LayerExperts | None]) -> Path:
    own = [layer for layer in layers if layer is not None]
    paths = {r.path for layer in own for tensors in layer.tensors for r in tensors}
    files = []
    for path in sorted(path.resolve() for path in paths):
        status = path.stat()
        files.append((str(path), status.st_size, status.st_mtime_ns))
    key = f"{files} {[len(x.tensors) if x else 0 for x in layers]}"
    return cache_folder() / f"experts-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
