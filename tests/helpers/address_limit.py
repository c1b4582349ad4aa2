"""A process that may map no more memory, as under `ulimit -v`."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_LEFT_BYTES = 1_000_000  # for Python's own allocations meanwhile


@contextmanager
def no_more_address_space() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_AS)
    n_pages = int(Path("/proc/self/statm").read_text().split()[0])
    max_bytes = n_pages * resource.getpagesize() + _LEFT_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
