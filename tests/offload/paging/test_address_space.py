"""Pages move without loss, and mappings are found whatever else is mapped."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path

import pytest
from mapped_weights import (
    MAP_PRIVATE,
    MAP_SHARED,
    is_readable,
    libc,
    map_file,
    memory_in,
    needs_whole_pages,
)
from system_probes import needs_populated_memory, needs_split_mappings

from offload.paging import address_space
from offload.paging.address_space import (
    PROT_NONE,
    PROT_READ_WRITE,
    AddressSpaceError,
    MappedRange,
    Move,
    _attempt,
    check_supported,
    commit,
    find_mapping,
    give_back_zeros,
    move_pages,
    protect,
    reserve,
    unmap,
    view,
)
from offload.storage.aligned import PAGE_BYTES, page_up

MIB = 1 << 20
HUGE = 2 * MIB
MADV_DONTFORK = 10


@pytest.fixture
def region() -> object:
    """Reserve 64 MiB of address space, aligned to 2 MiB."""
    base = reserve(64 * MIB + HUGE)
    yield -(-base // HUGE) * HUGE
    unmap(base, 64 * MIB + HUGE)


def test_zeros_take_no_memory_until_something_is_written(region: int) -> None:
    commit(region, 8 * HUGE)
    give_back_zeros(region + 100, 4 * HUGE)  # the pages wholly inside
    inside = [(region, 8 * HUGE)]
    assert memory_in(inside) <= 4 * HUGE + 2 * PAGE_BYTES
    bytes_there = view(region, 8 * HUGE)
    bytes_there[HUGE] = 7
    assert memory_in(inside) <= 4 * HUGE + 3 * PAGE_BYTES
    assert bytes(bytes_there[HUGE : HUGE + 3]) == b"\x07\0\0"


# --- mappings -------------------------------------------------------------------------------------


@needs_whole_pages
@pytest.mark.parametrize("flags", [MAP_SHARED, MAP_PRIVATE])
def test_find_mapping(tmp_path: Path, flags: int) -> None:
    path, other = tmp_path / "a b.bin", tmp_path / "other"
    path.write_bytes(bytes(50_000))
    other.write_bytes(bytes(50_000))
    assert find_mapping(path) == []
    third = map_file(other)
    address, size = map_file(path, 8 * PAGE_BYTES, flags)
    assert size == page_up(50_000)
    try:
        assert find_mapping(path) == [MappedRange(address, size, 0)]
        link = tmp_path / "link"
        link.symlink_to(path)
        assert find_mapping(link) == [MappedRange(address, size, 0)]
        second, _ = map_file(path, 0, flags)
        expected = sorted([MappedRange(address, size, 0), MappedRange(second, size, 0)],
                          key=lambda mapped: mapped.address)  # fmt: skip
        assert find_mapping(path) == expected
        libc.munmap(second, size)
    finally:
        libc.munmap(address, size)
        libc.munmap(*third)


def test_a_mapping_without_its_first_page_and_in_several_parts(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(20 * PAGE_BYTES))
    address, size = map_file(path)
    try:
        libc.munmap(address, PAGE_BYTES)  # the kernel would put a new page into the hole
        rest = MappedRange(address + PAGE_BYTES, size - PAGE_BYTES, PAGE_BYTES)
        assert find_mapping(path) == [rest]
        libc.madvise(address + 4 * PAGE_BYTES, PAGE_BYTES, MADV_DONTFORK)  # another VMA
        assert find_mapping(path) == [rest]
        libc.munmap(address + 8 * PAGE_BYTES, PAGE_BYTES)
        assert find_mapping(path) == [
            MappedRange(address + PAGE_BYTES, 7 * PAGE_BYTES, PAGE_BYTES),
            MappedRange(address + 9 * PAGE_BYTES, 11 * PAGE_BYTES, 9 * PAGE_BYTES),
        ]
    finally:
        libc.munmap(address, size)


def test_a_file_of_the_same_name_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(9000))
    address, size = map_file(path)
    path.unlink()
    path.write_bytes(bytes(9000))
    assert find_mapping(path) == []
    libc.munmap(address, size)


@pytest.mark.parametrize("make", [lambda path: None, lambda path: path.write_bytes(b"")])
def test_files_that_cannot_be_mapped(tmp_path: Path, make) -> None:
    make(tmp_path / "file")
    with pytest.raises(AddressSpaceError, match="cannot map"):
        find_mapping(tmp_path / "file")


# --- moving ---------------------------------------------------------------------------------------


def test_this_system_can_move_pages() -> None:
    before = len(Path("/proc/self/maps").read_bytes().splitlines())
    check_supported()
    assert len(Path("/proc/self/maps").read_bytes().splitlines()) <= before + 1


def test_a_system_that_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address_space, "_MREMAP_MOVE", 1 | 2 | 4 | 64)  # an unknown flag
    with pytest.raises(AddressSpaceError, match="Invalid argument") as caught:
        check_supported()
    assert caught.value.errno == errno.EINVAL


def test_huge_pages_stay_huge(region: int) -> None:
    source, target, size = region, region + 32 * MIB, 8 * HUGE
    commit(source, size)
    if memory_in([(source, size)], "AnonHugePages") < size:
        pytest.skip("no huge pages to be had")
    view(source, size)[:] = os.urandom(HUGE) * 8
    content = bytes(view(source, size))
    for _ in range(1000):
        for start, stop in ((source, target), (target, source)):
            protect(start, size, PROT_NONE)
            move_pages([Move(start, stop, size)], [])
            protect(stop, size, PROT_READ_WRITE)
            assert not is_readable(start)
    assert bytes(view(source, size)) == content
    assert memory_in([(source, size)]) == size
    assert memory_in([(source, size)], "AnonHugePages") == size
    assert memory_in([(target, size)]) == 0


@needs_populated_memory
def test_committed_memory_is_small_pages_where_asked(region: int) -> None:
    commit(region, 3 * HUGE, huge=False)
    assert memory_in([(region, 3 * HUGE)]) == 3 * HUGE
    assert memory_in([(region, 3 * HUGE)], "AnonHugePages") == 0
    commit(region + 16 * MIB + PAGE_BYTES, 2 * HUGE)  # one of them is whole
    assert memory_in([(region + 16 * MIB, 8 * MIB)]) == 2 * HUGE


def attempt_as_before_6_17(move: Move) -> bool:
    """Move one VMA at a time; a failed call may have unmapped the target."""
    vmas = address_space._read_maps()
    borders = {vma.start for vma in vmas if move.source < vma.start < move.source + move.n_bytes}
    if borders:
        libc.munmap(move.target, move.n_bytes)
        ctypes.set_errno(errno.EFAULT)
        return False
    return _attempt(move)


@needs_split_mappings
@pytest.mark.parametrize("old_kernel", [False, True])
@pytest.mark.parametrize("n_borders", [0, 1, 3])
def test_a_range_of_several_vmas_moves_as_a_whole(
    region: int, n_borders: int, old_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if old_kernel:
        monkeypatch.setattr(address_space, "_attempt", attempt_as_before_6_17)
    n_pages = 16
    size = n_pages * PAGE_BYTES
    source, target = region, region + 32 * MIB
    commit(source, size)
    content = os.urandom(size)
    view(source, size)[:] = content
    for border in range(n_borders):
        libc.madvise(source + (4 * border + 2) * PAGE_BYTES, PAGE_BYTES, MADV_DONTFORK)
    there: list[Move] = []
    move_pages([Move(source, target, size)], there)
    assert sum(move.n_bytes for move in there) == size
    assert not old_kernel or len(there) == 2 * n_borders + 1
    assert ctypes.string_at(target, size) == content
    assert memory_in([(target, size)]) == size
    back: list[Move] = []
    move_pages([Move(m.target, m.source, m.n_bytes) for m in there], back)
    assert ctypes.string_at(source, size) == content


def test_moves_that_are_refused(region: int) -> None:
    commit(region, PAGE_BYTES)
    for source, target in ((region, region + 1), (region + 1, region + MIB)):
        with pytest.raises(AddressSpaceError, match="errno 22"):
            move_pages([Move(source, target, PAGE_BYTES)], [])
    hole = reserve(4 * PAGE_BYTES)
    unmap(hole, 4 * PAGE_BYTES)
    done: list[Move] = []
    good = Move(region, region + MIB, PAGE_BYTES)
    with pytest.raises(AddressSpaceError, match="mapped at|errno 14"):
        move_pages([good, Move(hole, region + 2 * MIB, 4 * PAGE_BYTES)], done)
    assert done == [good]
    with pytest.raises(AddressSpaceError, match="mmap of .* Cannot allocate memory") as caught:
        reserve(1 << 60)
    assert caught.value.errno == errno.ENOMEM


def test_what_took_the_targets_place_is_not_overwritten(
    region: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses, and before the second attempt another mapping takes the target."""
    commit(region, 2 * PAGE_BYTES)
    libc.madvise(region, PAGE_BYTES, MADV_DONTFORK)
    commit(region + MIB, 2 * PAGE_BYTES)
    view(region + MIB, 1)[0] = 7

    def refuse(move: Move) -> bool:
        ctypes.set_errno(errno.EFAULT)
        return False

    monkeypatch.setattr(address_space, "_attempt", refuse)
    with pytest.raises(AddressSpaceError, match="was taken"):
        move_pages([Move(region, region + MIB, 2 * PAGE_BYTES)], [])
    assert view(region + MIB, 1)[0] == 7
