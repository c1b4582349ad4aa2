"""The time of moving pages is measured on temporary memory, which is freed afterwards."""

from __future__ import annotations

import mmap
from pathlib import Path

from system_probes import needs_own_memory

from offload.paging.memory import move_seconds_per_byte


def _address_space_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE


@needs_own_memory
def test_it_is_measured_and_nothing_stays_behind() -> None:
    measure = move_seconds_per_byte.__wrapped__
    measure()  # mappings of a first use that stay
    before = _address_space_bytes()
    assert measure() > 0
    assert _address_space_bytes() <= before
