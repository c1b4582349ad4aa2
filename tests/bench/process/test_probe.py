"""The storage probe reads every byte it counts, without any streamer code."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from open_files import n_open_files

from bench.process import probe
from bench.process.probe import (
    BLOCK_BYTES,
    BUFFER_BYTES,
    BUFFERED,
    DIRECT,
    N_THREADS,
    ProbeError,
    probe_bandwidth,
)
from offload.units import MIB

PAGE = 4096
BLOCK = 16 * PAGE
PREADV = os.preadv
OPEN = os.open


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[int, bytes]:
    """The probe's reads, by offset."""
    seen: dict[int, bytes] = {}

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        n_read = PREADV(descriptor, buffers, offset)
        if len(buffers[0]) > PAGE:  # without the trial read of one page
            assert offset not in seen
            seen[offset] = bytes(buffers[0][:n_read])
        return n_read

    monkeypatch.setattr(os, "preadv", preadv)
    return seen


@pytest.fixture
def refusing_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Any, flags: int, *more: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return OPEN(path, flags, *more)

    monkeypatch.setattr(os, "open", refuse)


def write(folder: Path, n_bytes: int) -> Path:
    path = folder / "weights"
    path.write_bytes(os.urandom(n_bytes))
    return path


# Whole blocks, a last block that is no whole page, less than a block, less than a page.
@pytest.mark.parametrize("n_bytes", [8 * BLOCK, 7 * BLOCK + 5001, BLOCK - PAGE, 100])
@pytest.mark.parametrize("n_threads", [1, 4])
def test_every_byte_is_read_once(
    tmp_path: Path, reads: dict[int, bytes], n_bytes: int, n_threads: int
) -> None:
    path = write(tmp_path, n_bytes)
    actual = probe_bandwidth(path, block_bytes=BLOCK, n_threads=n_threads)
    assert actual.n_bytes == n_bytes
    assert b"".join(data for _, data in sorted(reads.items())) == path.read_bytes()
    assert actual.bytes_per_second == n_bytes / actual.seconds > 0


def test_a_part_of_a_long_file_from_anywhere(tmp_path: Path, reads: dict[int, bytes]) -> None:
    path = write(tmp_path, 40 * BLOCK)
    starts = set()
    for _ in range(20):
        reads.clear()
        actual = probe_bandwidth(path, n_bytes=5 * BLOCK, block_bytes=BLOCK, n_threads=1)
        assert actual.n_bytes == 5 * BLOCK
        assert len(reads) == 5
        starts.add(next(iter(reads)))
    assert len(starts) > 1  # equal by chance once in 40**19


def test_the_default_range_is_large_and_its_buffers_are_counted() -> None:
    assert (N_THREADS, BLOCK_BYTES) == (4, 8 * MIB)
    assert BUFFER_BYTES == 32 * MIB
    assert probe.PROBE_BYTES >= 1024 * MIB


def test_without_o_direct_it_says_so(
    tmp_path: Path, reads: dict[int, bytes], refusing_direct: None
) -> None:
    path = write(tmp_path, 3 * BLOCK + 7)
    actual = probe_bandwidth(path, block_bytes=BLOCK)
    assert actual.method == BUFFERED
    assert "posix_fadvise" in actual.method
    assert b"".join(data for _, data in sorted(reads.items())) == path.read_bytes()


def test_a_file_system_that_refuses_only_the_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, 3 * BLOCK)
    n_open = n_open_files()
    refused = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if not refused:
            refused.append(descriptor)
            raise OSError(errno.EINVAL, "Invalid argument")
        return PREADV(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert probe_bandwidth(path, block_bytes=BLOCK).method == BUFFERED
    assert n_open_files() == n_open


def test_a_file_in_memory(reads: dict[int, bytes]) -> None:
    """tmpfs refuses O_DIRECT up to Linux 6.5 and accepts it from 6.6 on."""
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = write(Path(folder), 5 * BLOCK + 1)
        actual = probe_bandwidth(path, block_bytes=BLOCK)
        assert actual.method in (DIRECT, BUFFERED)
        assert actual.n_bytes == 5 * BLOCK + 1
        assert b"".join(data for _, data in sorted(reads.items())) == path.read_bytes()


def test_short_reads_go_on_at_a_whole_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, 2 * BLOCK + 100)
    offsets = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        offsets.append(offset)
        return PREADV(descriptor, [memoryview(buffers[0])[: 2 * PAGE]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    assert probe_bandwidth(path, block_bytes=BLOCK, n_threads=1).n_bytes == 2 * BLOCK + 100
    assert set(offsets) == {*range(0, 2 * BLOCK, 2 * PAGE), 2 * BLOCK}


def fail(*_: Any) -> int:
    raise OSError(errno.EIO, "Input/output error")


def end_early(*_: Any) -> int:
    return 0


@pytest.mark.parametrize(
    ("faulty", "part"), [(fail, "Input/output error"), (end_early, "the file ended at")]
)
def test_a_fault_of_a_reader_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faulty: Callable[..., int], part: str
) -> None:
    path = write(tmp_path, 4 * BLOCK)
    n_open = n_open_files()

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        is_trial = len(buffers[0]) == PAGE
        return (PREADV if is_trial else faulty)(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ProbeError, match=part) as caught:
        probe_bandwidth(path, block_bytes=BLOCK)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert n_open_files() == n_open


def test_files_that_cannot_be_measured(tmp_path: Path) -> None:
    with pytest.raises(ProbeError, match="No such file"):
        probe_bandwidth(tmp_path / "none")
    (tmp_path / "empty").touch()
    with pytest.raises(ProbeError, match="is empty"):
        probe_bandwidth(tmp_path / "empty")
    with pytest.raises(ProbeError, match="Is a directory"):
        probe_bandwidth(tmp_path)


@pytest.mark.parametrize(
    "wrong", [{"block_bytes": 1000}, {"block_bytes": 0}, {"n_threads": 0}, {"n_bytes": 0}]
)
def test_wrong_sizes(tmp_path: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cannot probe"):
        probe_bandwidth(write(tmp_path, BLOCK), **wrong)


def test_it_uses_nothing_that_it_is_a_yardstick_of() -> None:
    code = (
        "import sys, bench.process.probe; "
        "print([m for m in sys.modules if m.startswith(('offload.', 'specdec', 'backends'))])"
    )
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "['offload.errors']"
