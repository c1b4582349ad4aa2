"""Low-level control of the address space: file mappings, and pages that move without a copy.

All calls go to libc through ctypes, loaded such that they keep the interpreter lock: each takes
microseconds, and getting the lock back from a busy thread would take milliseconds. Populating
memory takes long, and releases it.

`mremap` with MREMAP_DONTUNMAP moves the pages of a range elsewhere and leaves the range reserved
and empty. Huge pages stay huge where both addresses are multiples of their size. Source:
mremap(2); Linux 5.7 and newer.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offload.errors import SpecdecError
from offload.storage.aligned import (
    HUGE_PAGE_BYTES,
    PAGE_BYTES,
    page_down,
    page_up,
    populate_in_parallel,
)

PROT_NONE = 0
PROT_READ = 1
PROT_READ_WRITE = 3

_MAP_SHARED = 0x01
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MREMAP_MOVE = 1 | 2 | 4  # MAYMOVE, FIXED, DONTUNMAP
_MADV_DONTNEED = 4
_MADV_HUGEPAGE = 14
_MADV_NOHUGEPAGE = 15
_MADV_WIPEONFORK = 18  # Linux 4.14
_FAILED = -1
_MAPS = Path("/proc/self/maps")


class AddressSpaceError(SpecdecError):
    """The system refused to map, protect or move memory."""

    def __init__(self, message: str, number: int = 0) -> None:
        super().__init__(message)
        self.errno = number


@dataclass(frozen=True)
class MappedRange:
    """`n_bytes` (whole pages) of a file from `file_offset` on are mapped at `address`."""

    address: int
    n_bytes: int
    file_offset: int


@dataclass(frozen=True)
class Move:
    """The pages of [source, source + n_bytes), to be moved to `target`."""

    source: int
    target: int
    n_bytes: int


@dataclass(frozen=True)
class _Vma:
    """One line of /proc/self/maps."""

    start: int
    end: int
    permissions: str  # "rw-p"
    file_offset: int
    file: tuple[str, int]  # device and inode, as this kernel writes them; inode 0: no file


def check_supported() -> None:
    """Raise AddressSpaceError if pages cannot be moved, before anything is touched."""
    source, target = reserve(PAGE_BYTES), reserve(PAGE_BYTES)
    try:
        protect(source, PAGE_BYTES, PROT_READ_WRITE)
        view(source, 1)[0] = 1
        move_pages([Move(source, target, PAGE_BYTES)], [])
        if view(target, 1)[0] != 1:
            raise AddressSpaceError("mremap moved no page; load the model into memory")
    finally:
        unmap(source, PAGE_BYTES)
        unmap(target, PAGE_BYTES)


def find_mapping(path: Path) -> list[MappedRange]:
    """Return the mappings of `path` in this process by ascending address, neighbours joined.

    Raises:
        AddressSpaceError: the file cannot be opened or mapped.
    """
    # On btrfs and overlayfs the maps file shows another device and inode than stat. A page that we
    # map ourselves shows the identity of this file. PROT_NONE keeps it from merging with others.
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 1, prot=PROT_NONE) as own:
            address = np.frombuffer(own, np.uint8).ctypes.data
            vmas = list(_read_maps())
    except (OSError, ValueError) as error:  # ValueError: an empty file
        raise AddressSpaceError(f"cannot map {path}: {error}") from error
    key = next(vma.file for vma in vmas if vma.start <= address < vma.end)
    result: list[MappedRange] = []
    for vma in vmas:
        if vma.file == key and not vma.start <= address < vma.end:
            _append_joined(result, MappedRange(vma.start, vma.end - vma.start, vma.file_offset))
    return result


def map_over(path: Path, mapped: MappedRange) -> None:
    """Map this part of `path` over what is mapped there; the file is read on access only.
    Raises AddressSpaceError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise AddressSpaceError(f"cannot map {path}: {error.strerror or error}") from error
    try:
        flags, offset = _MAP_SHARED | _MAP_FIXED, mapped.file_offset
        result = _libc().mmap(mapped.address, mapped.n_bytes, PROT_READ, flags, descriptor, offset)
    finally:
        os.close(descriptor)
    if result == _FAILED:
        raise _error("mmap", mapped.n_bytes)


def reserve(n_bytes: int, address: int | None = None) -> int:
    """Reserve address space without memory, in which every access faults, and return its address.
    With `address`, it replaces what is mapped there."""
    flags = _MAP_PRIVATE_ANONYMOUS | _MAP_NORESERVE | (_MAP_FIXED if address is not None else 0)
    result = _libc().mmap(address or 0, n_bytes, PROT_NONE, flags, -1, 0)
    if result == _FAILED:
        raise _error("mmap", n_bytes)
    return int(result)


def unmap(address: int, n_bytes: int) -> None:
    """Unmap a range: release its addresses and its memory."""
    if _libc().munmap(address, n_bytes) == _FAILED:
        raise _error("munmap", n_bytes)


def protect(address: int, n_bytes: int, protection: int) -> None:
    if _libc().mprotect(address, n_bytes, protection) == _FAILED:
        raise _error("mprotect", n_bytes)


def commit(address: int, n_bytes: int, *, huge: bool = True) -> None:
    """Back a reserved range with zeroed memory of its own, on huge pages as far as they fit.

    Raises:
        MemoryError: the memory cannot be had.
        An exception of a signal handler that ran meanwhile.
    """
    prepare(address, n_bytes, huge=huge)
    populate_in_parallel(address, n_bytes)
    stop_huge_pages(address, n_bytes)


def prepare(address: int, n_bytes: int, *, huge: bool = True) -> None:
    """Make a reserved range ready to be populated, on huge pages as far as they fit.
    Call `stop_huge_pages` afterwards."""
    libc = _libc()
    protect(address, n_bytes, PROT_READ_WRITE)
    libc.madvise(address, n_bytes, _MADV_NOHUGEPAGE)  # not over the range's ends; may fail
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + n_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if huge and start < end:
        libc.madvise(start, end - start, _MADV_HUGEPAGE)


def stop_huge_pages(address: int, n_bytes: int) -> None:
    """Stop khugepaged for this range once it is populated: it would fill what has been moved out
    with pages that are not counted. Existing huge pages stay huge."""
    _libc().madvise(address, n_bytes, _MADV_NOHUGEPAGE)


def give_back_zeros(address: int, n_bytes: int) -> None:
    """Free the whole pages of a private range that holds only zeros, until it is written again.
    It uses small pages from then on, so few written bytes take few pages. Locked memory stays.
    """
    start, end = page_up(address), page_down(address + n_bytes)
    if start < end:
        _libc().madvise(start, end - start, _MADV_NOHUGEPAGE)
        give_back(start, end - start)


def give_back(address: int, n_bytes: int) -> None:
    """Free the memory of whole private pages; they read as zeros until written again."""
    _libc().madvise(address, n_bytes, _MADV_DONTNEED)


def keep_from_children(address: int, n_bytes: int) -> None:
    """Make forked processes see zeros here, and wherever these pages are moved to.

    Not MADV_DONTFORK: the child would map other things in the hole, and unmap them with the model.
    """
    if _libc().madvise(address, n_bytes, _MADV_WIPEONFORK) == _FAILED:
        raise _error("madvise", n_bytes)


def view(address: int, n_bytes: int) -> memoryview:
    """Return the bytes at an address; the view does not keep them alive."""
    return memoryview((ctypes.c_ubyte * n_bytes).from_address(address)).cast("B")


def move_pages(moves: Iterable[Move], done: list[Move]) -> None:
    """Move pages; each source stays reserved and empty. The targets must be reserved.

    Args:
        done: receives the moves made, in order, possibly split into more parts than `moves`; valid
            also when this raises.

    Raises:
        AddressSpaceError: a move was refused.
    """
    for move in moves:
        _move(move, done)


def _move(move: Move, done: list[Move]) -> None:
    if _attempt(move):
        done.append(move)
        return
    number = ctypes.get_errno()
    parts = _by_vma(move) if number == errno.EFAULT else [move]
    if len(parts) == 1:
        raise _error("mremap", move.n_bytes, number)
    for part in parts:
        _move(part, done)


def _attempt(move: Move) -> bool:
    """Return whether the kernel made the move."""
    n_bytes = move.n_bytes
    result = _libc().mremap(move.source, n_bytes, n_bytes, _MREMAP_MOVE, move.target)
    return bool(result != _FAILED)


def _by_vma(move: Move) -> list[Move]:
    """Split a move at the borders of VMAs, because the kernel moves one at a time.

    Ranges are laid out such that their VMAs merge again, so this is rare.
    """
    end, target_end = move.source + move.n_bytes, move.target + move.n_bytes
    parts = []
    for vma in _read_maps():
        start, stop = max(vma.start, move.source), min(vma.end, end)
        if start < stop:
            parts.append(Move(start, move.target + start - move.source, stop - start))
        # Before 6.17 the failed call has unmapped the target; another thread may have mapped it.
        is_target = vma.start < target_end and vma.end > move.target
        if is_target and (vma.permissions != "---p" or vma.file[1]):
            raise AddressSpaceError(f"address {move.target:#x} was taken; load the model again")
    if sum(part.n_bytes for part in parts) != move.n_bytes:
        raise AddressSpaceError(f"nothing is mapped at {move.source:#x}; load the model again")
    return parts


def n_mappings() -> int:
    """Return the number of mappings of this process."""
    return _MAPS.read_bytes().count(b"\n")


def max_mappings() -> int:
    """Return the number of mappings that a process may have."""
    return int(Path("/proc/sys/vm/max_map_count").read_text())


def _append_joined(result: list[MappedRange], added: MappedRange) -> None:
    last = result[-1] if result else None
    if (
        last is not None
        and last.address + last.n_bytes == added.address
        and last.file_offset + last.n_bytes == added.file_offset
    ):
        result[-1] = MappedRange(last.address, last.n_bytes + added.n_bytes, last.file_offset)
    else:
        result.append(added)


def _read_maps() -> Iterator[_Vma]:
    pattern = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) (\S+) ([0-9a-f]+) (\S+) (\d+)")
    for line in _MAPS.read_bytes().splitlines():
        if match := pattern.match(line):
            start, end, permissions, offset, device, inode = match.groups()
            yield _Vma(
                int(start, 16),
                int(end, 16),
                permissions.decode(),
                int(offset, 16),
                (device.decode(), int(inode)),
            )


@functools.cache
def _libc() -> ctypes.PyDLL:
    libc = ctypes.PyDLL(None, use_errno=True)
    address, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    # Results are addresses or -1; addresses of user space have no sign bit.
    for name, arguments, result in (
        ("mmap", (address, size, number, number, number, ctypes.c_long), ctypes.c_ssize_t),
        ("munmap", (address, size), number),
        ("mprotect", (address, size, number), number),
        ("madvise", (address, size, number), number),
        ("mremap", (address, size, size, number, address), ctypes.c_ssize_t),
    ):
        function = getattr(libc, name)
        function.argtypes, function.restype = arguments, result
    return libc


def _error(call: str, n_bytes: int, number: int | None = None) -> AddressSpaceError:
    number = ctypes.get_errno() if number is None else number
    return AddressSpaceError(
        f"{call} of {n_bytes} bytes failed: {os.strerror(number)} (errno {number}); "
        "load the model into memory, or without streaming",
        number,
    )
