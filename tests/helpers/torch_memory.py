"""How much memory torch holds at a time."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(compute: Callable[[], object]) -> int:
    """Most, beside what it held before."""
    gc.collect()  # what is let go of meanwhile would count as less
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    pinned = limit = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            pinned += event.nbytes()
            limit = max(limit, pinned)
    return limit
