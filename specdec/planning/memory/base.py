"""Memory of the process before any weight is loaded, and its limit: the start of every plan."""

from __future__ import annotations

import gc
import mmap

import psutil

from backends.contract.source import ModelSource
from offload.process.allocator import give_back_freed
from offload.process.memory import companion_bytes, memory_limit, process_memory
from offload.units import format_bytes, format_down, parse_bytes
from specdec.checks import ConfigError, FieldName
from specdec.run_options import AUTO


def measure_base(*sources: ModelSource | None) -> int:
    """Return the process's resident bytes, after freeing what building the models left behind.

    sources: models whose decoders of packed weights are loaded first, as every run needs them.
    """
    for source in sources:
        if source is not None:
            source.load_decoders()
    gc.collect()
    give_back_freed()
    return process_memory().rss_bytes


def budget_of_run(memory_budget: str | int) -> tuple[int, str]:
    """Return (budget in bytes, its origin). Raises ConfigError."""
    limit = memory_limit()
    if memory_budget == AUTO:
        own_bytes = process_memory().rss_bytes + companion_bytes()
        free_bytes = psutil.virtual_memory().available + own_bytes
        if free_bytes < limit.n_bytes:
            return free_bytes, "what other processes leave free"
        return limit.n_bytes, limit.source
    whose = f"the limit of this process ({limit.source}), {format_down(limit.n_bytes)}"
    return asked_budget("memory", memory_budget, limit.n_bytes, whose), "as asked"


def asked_budget(ledger: str, requested: str | int, max_bytes: int, whose: str) -> int:
    """Parse a budget to bytes. Raises ConfigError above `max_bytes`, which `whose` describes."""
    n_bytes = parse_bytes(requested)
    if n_bytes - max_bytes >= mmap.PAGESIZE:  # the kernel steps limits down to whole pages
        raise ConfigError(
            f"the {ledger} budget of {format_bytes(n_bytes)} is above {whose}: lower ",
            FieldName(f"{ledger.lower()}_budget"),
            " to that",
        )
    return min(n_bytes, max_bytes)
