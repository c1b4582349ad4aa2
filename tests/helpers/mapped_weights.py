"""Files of known bytes, mapped as an inference library would, and inspection of their memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest
from weight_files import Weights

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import MappedRange, find_mapping
from offload.paging.pager import Pager
from offload.storage.aligned import PAGE_BYTES, page_down, page_up

HUGE = 2 << 20
MAP_SHARED, MAP_PRIVATE, MAP_FIXED, MAP_ANONYMOUS = 1, 2, 0x10, 0x20

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long)
libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_file(path: Path, remainder: int = 0, flags: int = MAP_SHARED) -> tuple[int, int]:
    """Return (address, bytes) of a mapping of the whole file; address % 2 MiB is `remainder`."""
    size = page_up(path.stat().st_size)
    reserved = libc.mmap(None, size + 2 * HUGE, 0, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)
    address = -(-reserved // HUGE) * HUGE + remainder
    descriptor = os.open(path, os.O_RDONLY)
    assert libc.mmap(address, size, 1, flags | MAP_FIXED, descriptor, 0) == address
    os.close(descriptor)
    libc.munmap(reserved, address - reserved)
    libc.munmap(address + size, reserved + size + 2 * HUGE - address - size)
    return address, size


def is_readable(address: int, n_bytes: int = 1) -> bool:
    """Return whether reading there works, without a crash."""
    view = memoryview((ctypes.c_ubyte * n_bytes).from_address(address))
    reading, writing = os.pipe()
    try:
        os.write(writing, view)
    except OSError as error:
        if error.errno != errno.EFAULT:
            raise
        return False
    finally:
        os.close(reading)
        os.close(writing)
    return True


@cache
def lists_whole_pages() -> bool:
    """Return whether /proc/self/maps gives a mapping's end in whole pages.

    An emulator of larger pages lists those of its host, so that a file's last page is cut short.
    """
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(PAGE_BYTES + 1))
        file.flush()
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
            (actual,) = find_mapping(Path(file.name))
    return actual.n_bytes % PAGE_BYTES == 0


needs_whole_pages = pytest.mark.skipif(
    not lists_whole_pages(), reason="this system maps the last page of a file short"
)


class MappedWeights:
    """Map all files of `weights`."""

    def __init__(self, weights: Weights, remainder: int = 0, flags: int = MAP_SHARED) -> None:
        if not lists_whole_pages():
            pytest.skip("this system maps the last page of a file short")
        self.weights = weights
        self.layers = weights.layers
        paths = dict.fromkeys(r.path for layer in weights.layers for r in layer.tensors)
        self.ranges = {path: map_file(path, remainder, flags) for path in paths}
        self.mappings: dict[Path, list[MappedRange]] = {path: find_mapping(path) for path in paths}

    def address(self, record: TensorRecord) -> int:
        return self.ranges[record.path][0] + record.offset

    def check(self, index: int) -> None:
        """Assert that all bytes of a layer are at their addresses."""
        for record in self.layers[index].tensors:
            actual = ctypes.string_at(self.address(record), record.n_bytes)
            assert actual == self.weights.contents[record.name], f"wrong bytes in {record.name}"

    def check_absent(self, index: int) -> None:
        """Assert that the pages wholly inside of streamed tensors cannot be read."""
        for record in self.layers[index].streamed:
            start = page_up(self.address(record))
            end = page_down(self.address(record) + record.n_bytes)
            for page in range(start, end, PAGE_BYTES):
                assert not is_readable(page), f"a page of {record.name} is there"

    def check_resident(self) -> None:
        for layer in self.layers:
            for record in layer.resident_records:
                actual = ctypes.string_at(self.address(record), record.n_bytes)
                assert actual == self.weights.contents[record.name]

    def run_passes(self, pager: Pager, n_passes: int = 1, stop_before: int = -1) -> None:
        """Check all layers of some passes; leave the last pass before layer `stop_before`."""
        for number in range(n_passes):
            for index in range(len(self.layers)):
                if index == stop_before and number == n_passes - 1:
                    return
                with pager.layer(index):
                    self.check(index)

    def close(self) -> None:
        for address, size in self.ranges.values():
            libc.munmap(address, size)


@contextmanager
def mapped(
    weights: Weights, remainder: int = 0, flags: int = MAP_SHARED
) -> Iterator[MappedWeights]:
    """Map the files within the block. A pager must be closed before its end."""
    files = MappedWeights(weights, remainder, flags)
    try:
        yield files
    finally:
        files.close()


def memory_in(ranges: Iterable[tuple[int, int]], key: str = "Anonymous") -> int:
    """Return the bytes that smaps counts under `key` in VMAs from one of (address, bytes)."""
    expected = [(start, start + size) for start, size in ranges]
    total = 0
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if not line[0].isupper():  # "7f12a000-7f12b000 rw-p ...", not "Rss: ..."
            address = int(line.split("-", 1)[0], 16)
            inside = any(start <= address < end for start, end in expected)
        elif inside and line.startswith(key + ":"):
            total += int(line.split()[1]) * 1024
    return total
