"""Probes of this system's behaviour, for tests that depend on it. Emulators lack parts of it.

Each probe tries it out, whatever the system is called; a test that needs what is missing is skipped
and says so:

    @needs_populated_memory
    def test_...
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from mapped_weights import libc, memory_in

from offload.paging.address_space import PROT_READ_WRITE, protect, reserve, unmap
from offload.storage.aligned import PAGE_BYTES

_N_BYTES = 8 * PAGE_BYTES
_MADV_POPULATE_WRITE, _MADV_DONTFORK, _NO_ADVICE = 23, 10, 9999


@contextmanager
def _memory() -> Iterator[int]:
    """Return the address of fresh writable memory of `_N_BYTES`, between pages without access."""
    address = reserve(3 * _N_BYTES)
    try:
        protect(address + _N_BYTES, _N_BYTES, PROT_READ_WRITE)
        yield address + _N_BYTES
    finally:
        unmap(address, 3 * _N_BYTES)


def populates_memory() -> bool:
    """Return whether advice to populate memory allocates it, if the kernel reports success."""
    with _memory() as address:
        if libc.madvise(address, _N_BYTES, _MADV_POPULATE_WRITE):
            return True  # a kernel without this advice: memory is written to instead
        return memory_in([(address, _N_BYTES)]) == _N_BYTES


def refuses_unknown_advice() -> bool:
    """Return whether `madvise` reports advice that it does not implement."""
    with _memory() as address:
        return bool(libc.madvise(address, _N_BYTES, _NO_ADVICE))


def splits_mappings() -> bool:
    """Return whether advice for a part of a mapping splits it."""
    with _memory() as address:
        libc.madvise(address + PAGE_BYTES, PAGE_BYTES, _MADV_DONTFORK)
        starts = {start for start, _ in _mappings()}
        return {address, address + PAGE_BYTES, address + 2 * PAGE_BYTES} <= starts


def counts_own_memory_alone() -> bool:
    """Return whether the process's memory counts its own mappings only, none of an emulator's."""
    status = Path("/proc/self/status").read_text()
    counted = int(status.split("VmSize:")[1].split()[0]) * 1024
    listed = sum(end - start for start, end in _mappings())
    return counted <= listed + (1 << 20)


def limits_address_space() -> bool:
    """Return whether a limit of address space (ulimit -v) is enforced. An emulator that ignores it
    ends, or allocates without end, if more is requested than exists."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 24, before[1]))
    try:
        mmap.mmap(-1, 1 << 30).close()
    except OSError:
        return True
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return False


def _mappings() -> list[tuple[int, int]]:
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if not line.endswith("[vsyscall]"))
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def _needs(probe: Callable[[], bool], reason: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not probe(), reason=f"this system {reason}")


needs_populated_memory = _needs(populates_memory, "takes memory later than it says")
needs_advice = _needs(refuses_unknown_advice, "grants advice that it does not follow")
needs_split_mappings = _needs(splits_mappings, "keeps mappings whole, or lists too few")
needs_own_memory = _needs(counts_own_memory_alone, "counts an emulator's memory as a process's")
needs_address_limit = _needs(limits_address_space, "heeds no limit of address space")
