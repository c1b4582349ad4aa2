"""Storage that fails under the pager."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import random
import threading
from functools import partial
from pathlib import Path

import pytest
from mapped_weights import is_readable, mapped
from mapped_weights import memory_in as bytes_in
from paging import PAGE, check_memory, small_weights
from streaming import reader_threads, uneven_sizes, wait_for_failure
from system_probes import needs_populated_memory
from weight_files import FaultyReads, write_weights

from offload.paging.pager import Pager
from offload.storage.direct_io import DirectFile, StorageError

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def _raise_if(condition: bool) -> None:
    if condition:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("n_slots", [1, 2, 3])
@pytest.mark.parametrize("resume", [0, None])
@pytest.mark.usefixtures("small_huge_pages")
def test_a_transient_error_at_every_read(tmp_path: Path, n_slots: int, resume: int | None) -> None:
    weights = small_weights(tmp_path)
    with mapped(weights, PAGE) as files:
        n_calls = []
        for failing in range(-1, 1000):
            reads = FaultyReads(lambda call, length, n=failing: _raise_if(call == n))
            try:
                pager = Pager(
                    files.layers,
                    [],
                    files.mappings,
                    n_slots,
                    read_bytes=2 * PAGE,
                    storage=reads.storage,
                    poison=True,
                )
            except StorageError:
                assert failing >= 0  # an edge that is resident
                continue
            with pager:
                n_errors = 0
                for _ in range(3):
                    index = 0
                    while index < len(files.layers):
                        try:
                            with pager.layer(index):
                                files.check(index)
                            index += 1
                        except StorageError:
                            n_errors += 1
                            index = index if resume is None else resume
                check_memory(pager, files)
                n_calls.append(reads.n_calls)
                assert n_errors == (1 if failing >= 0 else 0)
            if failing > 40:
                break


@needs_populated_memory
def test_a_persistent_error_and_the_recovery(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: _raise_if(broken.is_set()))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=reads.storage) as pager,
    ):
        files.run_passes(pager, 2)
        broken.set()
        for _ in range(3):
            with pytest.raises(StorageError, match="Input/output error"):
                files.run_passes(pager, 3)
            check_memory(pager, files)
        pager.restart()
        with pytest.raises(StorageError, match="Input/output error"):
            files.run_passes(pager)
        broken.clear()
        files.run_passes(pager, 2)


@needs_populated_memory
def test_an_error_is_not_raised_again_once_storage_is_well(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    broken = threading.Event()
    reads = FaultyReads(lambda call, length: _raise_if(broken.is_set()))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=reads.storage) as pager,
    ):
        broken.set()
        with pytest.raises(StorageError, match="Input/output error"):
            files.run_passes(pager, 2)
        pager.restart()
        wait_for_failure(pager)
        broken.clear()
        files.run_passes(pager, 2)
        check_memory(pager, files)


@pytest.mark.parametrize("seed", range(4))
def test_short_and_interrupted_reads_change_nothing(tmp_path: Path, seed: int) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(6, seed, limit=60_000), n_files=2, resident=lambda i, j: j > 1
    )
    rng = random.Random(seed)

    def fault(call: int, length: int) -> int | None:
        if rng.random() < 0.2:
            raise InterruptedError(errno.EINTR, "interrupted")
        return rng.choice([None, rng.randint(1, length), 4096])

    reads = FaultyReads(fault)
    with (
        mapped(weights) as files,
        Pager(
            files.layers,
            [],
            files.mappings,
            3,
            read_bytes=2 * PAGE,
            storage=reads.storage,
            poison=True,
        ) as pager,
    ):
        files.run_passes(pager, 5)


class WatchedReads:
    """Reads that fail now and then, and record forbidden targets."""

    def __init__(self, rng: random.Random) -> None:
        self.pager: Pager | None = None
        self.wrong: list[str] = []
        self._rng = rng

    def __call__(self, descriptor: int, view: memoryview, offset: int) -> int:
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if self.pager is not None:
            for acquired in tuple(self.pager._acquired):
                if acquired.taken is None:
                    continue
                start = acquired.taken.slot.buffer.address
                if start <= address < start + self.pager.ring_bytes // self.pager.n_slots:
                    self.wrong.append(f"layer {acquired.index} is acquired and overwritten")
            if self._rng.random() < 0.05:
                raise OSError(errno.EIO, "Input/output error")
        try:
            return os.preadv(descriptor, [view], offset)
        except OSError as error:
            self.wrong.append(str(error))  # EFAULT: the memory is closed
            raise


@pytest.mark.parametrize("seed", range(3))
def test_readers_write_only_into_slots_that_are_not_acquired(tmp_path: Path, seed: int) -> None:
    """Through restarts, errors and nesting, no read targets memory whose pages are elsewhere."""
    rng = random.Random(seed)
    reads = WatchedReads(rng)
    storage = partial(DirectFile, read_at=reads)
    n_errors = 0
    with (
        mapped(write_weights(tmp_path, uneven_sizes(7, seed, limit=60_000))) as files,
        Pager(
            files.layers, [], files.mappings, 3, read_bytes=PAGE, storage=storage, poison=True
        ) as pager,
    ):
        reads.pager = pager
        for _ in range(150):
            start = rng.randrange(7)
            try:
                for index in range(start, rng.randint(start, 7)):
                    pager.enter(index)
                    pager.leave(index - 1)
                    files.check(index)
            except StorageError:
                n_errors += 1
            if rng.random() < 0.5:
                pager.restart()
            for index in range(7):
                pager.leave(index)
        check_memory(pager, files)
    assert n_errors > 0
    assert not reads.wrong


def test_a_file_cut_or_changed_while_running(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[29_000], [25_000], [42_000]])
    path = tmp_path / "shard-0.bin"
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, read_bytes=PAGE) as pager,
    ):
        files.run_passes(pager, 2)
        os.utime(path, ns=(1, 1))
        for _ in range(2):  # the error is persistent
            with pytest.raises(StorageError, match="changed while in use"):
                files.run_passes(pager)
        assert pager.stats.passes == 2
        os.truncate(path, 33_000)
        with pytest.raises(StorageError, match="ended early|changed while in use"):
            files.run_passes(pager, 3)
        check_memory(pager, files)


def test_resident_tensors_that_cannot_be_read(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]] * 4, resident=lambda i, j: i > 0)
    reads = FaultyReads(lambda call, length: _raise_if(call == 2))
    with mapped(weights) as files:
        with Pager(
            files.layers, [], files.mappings, 2, read_bytes=PAGE, storage=reads.storage
        ) as pager:
            with pytest.raises(StorageError, match="Input/output error"):
                files.run_passes(pager)
            files.run_passes(pager)  # missing bytes are read now
        assert bytes_in(files.ranges.values()) == 0
        for layer in files.layers:
            assert not is_readable(files.address(layer.tensors[0]))
        assert not reader_threads()
        gc.collect()
