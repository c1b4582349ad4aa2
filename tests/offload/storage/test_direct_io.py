"""Checked reads that bypass the page cache."""

from __future__ import annotations

import errno
import gc
import logging
import mmap
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from open_files import n_open_files
from system_probes import needs_advice
from weight_files import FaultyReads

from offload.storage import page_cache
from offload.storage.aligned import (
    ALIGNMENT,
    PAGE_BYTES,
    AlignedBuffer,
    align_up,
    page_up,
)
from offload.storage.direct_io import DirectFile, StorageError
from offload.storage.page_cache import bytes_from_devices, drop_cached, is_cached

SIZES = [1, 511, 512, 4095, 4096, 4097, 8191, 8192, 3 * 4096 + 17, 100_003]


def make_file(folder: Path, n_bytes: int) -> tuple[Path, bytes]:
    content = np.random.default_rng(n_bytes).bytes(n_bytes)
    path = folder / f"{n_bytes}.bin"
    path.write_bytes(content)
    return path, content


def read_all(file: DirectFile, n_bytes: int) -> bytes:
    buffer = AlignedBuffer(align_up(n_bytes))
    buffer.view[:] = b"\xaa" * len(buffer.view)
    n_read = file.read_into(buffer.view[: align_up(n_bytes)], 0)
    return bytes(buffer.view[:n_read])


# --- reads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_bytes", SIZES)
@pytest.mark.parametrize("direct", [True, False])
def test_content_at_every_aligned_offset(tmp_path: Path, n_bytes: int, direct: bool) -> None:
    path, content = make_file(tmp_path, n_bytes)
    file = DirectFile(path, direct=direct)
    buffer = AlignedBuffer(3 * ALIGNMENT)
    for offset in range(0, n_bytes, ALIGNMENT):
        for length in (ALIGNMENT, 3 * ALIGNMENT):
            n_read = file.read_into(buffer.view[:length], offset)
            assert n_read == min(length, n_bytes - offset)
            assert bytes(buffer.view[:n_read]) == content[offset : offset + n_read]
    file.close()
    file.close()


@pytest.mark.parametrize("limit", [512, 4096, 5000, 12_288, 50_000])
def test_short_reads_are_completed(tmp_path: Path, limit: int) -> None:
    path, content = make_file(tmp_path, 100_003)
    faulty = FaultyReads(lambda call, length: limit if call % 2 == 0 else max(limit, 4096) + 1024)
    assert read_all(DirectFile(path, read_at=faulty), 100_003) == content
    assert faulty.n_calls >= 2


def test_random_short_reads_and_interruptions(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100_003)
    for seed in range(50):
        rng = random.Random(seed)

        def fault(call: int, length: int, rng: random.Random = rng) -> int | None:
            if rng.random() < 0.3:
                raise InterruptedError(errno.EINTR, "interrupted")
            return rng.choice([None, rng.randint(1, length), 4096, 8192])

        assert read_all(DirectFile(path, read_at=FaultyReads(fault)), 100_003) == content


def test_a_read_error_names_file_offset_and_counts(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100_003)

    def fault(call: int, length: int) -> int | None:
        if call == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return 8192

    file = DirectFile(path, read_at=FaultyReads(fault))
    buffer = AlignedBuffer(40_960)
    with pytest.raises(StorageError) as caught:
        file.read_into(buffer.view[:40_960], 4096)
    text = str(caught.value)
    for part in (str(path), "Input/output error", "offset 4096", "wanted 40960", "got 8192"):
        assert part in text
    assert "\n" not in text
    assert file.read_into(buffer.view[:4096], 0) == 4096  # the file can be read again


def test_no_progress_ends(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 100_003)
    with pytest.raises(StorageError, match="no progress"):
        read_all(DirectFile(path, read_at=FaultyReads(lambda call, length: 100)), 100_003)

    def interrupt(call: int, length: int) -> int | None:
        raise InterruptedError(errno.EINTR, "interrupted")

    with pytest.raises(StorageError, match="interrupted"):
        read_all(DirectFile(path, read_at=FaultyReads(interrupt)), 100_003)


@pytest.mark.parametrize("cut", [0, 1, 4096, 50_000, 100_002])
def test_a_file_cut_after_opening(tmp_path: Path, cut: int) -> None:
    path, _ = make_file(tmp_path, 100_003)
    file = DirectFile(path)
    os.truncate(path, cut)
    with pytest.raises(StorageError, match="ended early.*wanted 100003"):
        read_all(file, 100_003)


def test_reading_past_the_end_and_opening_nothing(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 4096)
    buffer = AlignedBuffer(4096)
    with pytest.raises(StorageError, match="too short"):
        DirectFile(path).read_into(buffer.view, 4096)
    with pytest.raises(StorageError, match="cannot open .*No such file"):
        DirectFile(tmp_path / "none")


def test_changes_are_noticed(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 8192)
    file = DirectFile(path)
    file.check_unchanged()
    with path.open("r+b") as writer:
        writer.write(b"new")
    os.utime(path, ns=(1, 1))  # a clock tick later, whatever the clock's resolution
    with pytest.raises(StorageError, match="changed while in use"):
        file.check_unchanged()


def test_a_replaced_file_is_still_the_old_one(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 8192)
    file = DirectFile(path)
    other, _ = make_file(tmp_path, 4096)
    other.rename(path)
    file.check_unchanged()
    assert read_all(file, 8192) == content


def test_threads_share_a_file(tmp_path: Path) -> None:
    path, content = make_file(tmp_path, 100_003)
    file = DirectFile(path)
    wrong = []

    def run() -> None:
        for _ in range(20):
            if read_all(file, 100_003) != content:
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_forgotten_file_is_closed(tmp_path: Path) -> None:
    path, _ = make_file(tmp_path, 4096)
    gc.collect()
    before = n_open_files()
    for _ in range(5):
        DirectFile(path)
    gc.collect()
    assert n_open_files() == before


# --- without O_DIRECT -----------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
@pytest.mark.parametrize("where", ["open", "read"])
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_fallback_is_said_once_and_drops_behind(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    number: int,
) -> None:
    path, content = make_file(tmp_path, 100_003)
    real_open, real_preadv = os.open, os.preadv
    dropped: list[int] = []

    def refuse_open(name: object, flags: int, *rest: int) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, "no O_DIRECT here")
        return real_open(name, flags, *rest)  # type: ignore[call-overload]

    def refuse_probe(descriptor: int, views: list[memoryview], offset: int) -> int:
        if len(views[0]) in (ALIGNMENT, PAGE_BYTES):
            raise OSError(number, "larger blocks")
        return real_preadv(descriptor, views, offset)

    if where == "open":
        monkeypatch.setattr(os, "open", refuse_open)
    else:
        monkeypatch.setattr(os, "preadv", refuse_probe)
    monkeypatch.setattr(DirectFile, "_warned", False)
    with caplog.at_level(logging.WARNING):
        files = [DirectFile(path), DirectFile(path)]
    assert not any(file.direct for file in files)
    assert sum("without O_DIRECT" in record.message for record in caplog.records) == 1
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, start, size, how: dropped.append(size))
    assert read_all(files[0], 100_003) == content
    assert dropped == [page_up(100_003)]


def test_other_errors_of_the_probe_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = make_file(tmp_path, 4096)

    def fail(descriptor: int, views: list[memoryview], offset: int) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        DirectFile(path)


_MIDDLE = 100_003 // 2 // ALIGNMENT
"""The page that is read first of a file of this size."""


@pytest.fixture
def _ignored_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a file system that accepts O_DIRECT and reads through the page cache."""
    real_open = os.open

    def ignore(name: object, flags: int, *rest: int) -> int:
        return real_open(name, flags & ~os.O_DIRECT, *rest)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "open", ignore)


def written(folder: Path, n_bytes: int) -> tuple[Path, bytes]:
    """Write a file that is on the disk and not in the page cache."""
    path, content = make_file(folder, n_bytes)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    drop_cached(descriptor)
    os.close(descriptor)
    if cached_pages(path):
        pytest.skip("this file system keeps its files in the page cache")
    return path, content


def cached_pages(path: Path) -> list[int]:
    descriptor = os.open(path, os.O_RDONLY)
    pages = range(-(-path.stat().st_size // ALIGNMENT))
    actual = [page for page in pages if is_cached(descriptor, page * ALIGNMENT)]
    os.close(descriptor)
    return actual


def test_a_direct_file_is_distinguished_from_others(tmp_path: Path) -> None:
    path, _ = written(tmp_path, 100_003)
    file = DirectFile(path)
    assert file.direct == (not cached_pages(path))


@pytest.mark.usefixtures("_ignored_flag")
def test_a_flag_that_is_ignored_is_found_out(tmp_path: Path) -> None:
    path, content = written(tmp_path, 100_003)
    file = DirectFile(path)
    assert not file.direct
    assert read_all(file, 100_003) == content
    assert cached_pages(path) == []


@pytest.fixture
def mapped(tmp_path: Path) -> Iterator[Path]:
    """A file with the inspected page mapped and used by somebody."""
    path, _ = written(tmp_path, 100_003)
    with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ) as pages:
        pages.madvise(mmap.MADV_RANDOM)
        pages[_MIDDLE * ALIGNMENT]
        yield path


@pytest.mark.skipif(bytes_from_devices() is None, reason="this system does not count reads")
def test_a_mapped_file_that_is_read_directly_all_the_same(mapped: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "other").mkdir()
    other, _ = written(folder, 100_003)
    assert DirectFile(mapped).direct == DirectFile(other).direct


@pytest.mark.skipif(bytes_from_devices() is None, reason="this system does not count reads")
@pytest.mark.usefixtures("_ignored_flag")
def test_a_flag_that_is_ignored_is_found_out_of_a_mapped_file(mapped: Path) -> None:
    assert not DirectFile(mapped).direct


@needs_advice
@pytest.mark.usefixtures("_ignored_flag")
def test_nothing_stays_in_the_page_cache_where_it_cannot_be_found_out(
    mapped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "_THREAD_IO", tmp_path / "no such file")
    file = DirectFile(mapped)
    assert file.direct
    read_all(file, 100_003)
    assert cached_pages(mapped) == [_MIDDLE]


@pytest.mark.skipif(bytes_from_devices() is None, reason="this system does not count reads")
def test_files_in_memory_are_not_read_directly() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path, content = make_file(Path(folder), 100_003)
        file = DirectFile(path)
        assert not file.direct
        assert read_all(file, 100_003) == content
