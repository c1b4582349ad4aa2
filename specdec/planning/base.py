"""What the process takes before any weight is there: every plan begins with it."""

from __future__ import annotations

import gc

from offload.process.allocator import give_back_freed
from offload.process.memory import process_memory


def measure_base() -> int:
    """Bytes in memory, without what building the models left behind."""
    gc.collect()
    give_back_freed()
    return process_memory().rss_bytes
