"""The peak of torch's memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(compute: Callable[[], object]) -> int:
    """Return the peak memory, beyond that allocated before."""
    gc.collect()  # memory freed meanwhile would hide usage
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    pinned = limit = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            pinned += event.nbytes()
            limit = max(limit, pinned)
    return limit
