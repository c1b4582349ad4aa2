"""Waiting for a layer, closing meanwhile, and the state afterwards."""

from __future__ import annotations

import gc
import logging
import threading
from pathlib import Path

import pytest
from mapped_weights import mapped
from mapped_weights import memory_in as bytes_in
from open_files import n_open_files
from paging import page_weights, slot_ranges
from streaming import Gate, reader_threads, uneven_sizes
from weight_files import write_weights

from offload.paging.address_space import AddressSpaceError
from offload.paging.pager import Pager
from offload.ring.slots import StreamerClosed
from offload.storage.direct_io import StorageError

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_closing_while_the_caller_waits(tmp_path: Path) -> None:
    gate = Gate(0)
    caught: list[BaseException] = []
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2, storage=gate.storage)

        def wait() -> None:
            try:
                pager.enter(0)
            except BaseException as error:
                caught.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        gate.reached.wait()
        closing = threading.Thread(target=pager.close)
        closing.start()
        waiting.join()
        assert isinstance(caught[0], StreamerClosed)
        gate.opened.set()
        closing.join()


@pytest.mark.parametrize("is_in", [False, True])
def test_closing_gives_all_memory_back_and_leaves_no_trap(tmp_path: Path, is_in: bool) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(5, 3, limit=60_000), resident=lambda i, j: j == 1
    )
    with mapped(weights) as files:
        pager = Pager(files.layers, [], files.mappings, 2)
        slots = slot_ranges(pager)
        if is_in:
            pager.enter(0)
        pager.close()
        pager.close()
        assert not reader_threads()
        assert bytes_in([*slots, *files.ranges.values()]) == 0
        for index in range(5):
            files.check_absent(index)
        with pytest.raises(StreamerClosed):
            pager.enter(0)
        pager.leave(0)
        pager.restart()
    # The owner has unmapped the file; the pager must not touch a mapping there.
    with mapped(weights) as files:
        pager.close()
        del pager
        gc.collect()
        files.check(0)


def test_a_read_that_never_returns_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("offload.ring.cursor.JOIN_SECONDS", 0.01)
    gate = Gate(0)
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2, storage=gate.storage)
        gate.reached.wait()
        with caplog.at_level(logging.WARNING):
            pager.close()
        assert "does not return" in caplog.text
        files.check_absent(0)
    gate.opened.set()  # the late read writes to memory that still exists
    for thread in reader_threads():
        thread.join()


def test_a_forgotten_pager_ends_its_threads_and_leaves_the_mapping(tmp_path: Path) -> None:
    with mapped(page_weights(tmp_path)) as files:
        pager = Pager(files.layers, [], files.mappings, 2)
        slots = slot_ranges(pager)
        pager.enter(0)
        del pager
        gc.collect()
        for thread in reader_threads():
            thread.join(5)
        assert not reader_threads()
        files.check(0)
        gc.collect()
        assert bytes_in(slots) == 0


def test_arguments_are_checked_before_anything_is_touched(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[50_000]])
    with mapped(weights) as files:
        for keywords in ({"n_slots": 0}, {"n_slots": 1, "n_readers": 0}):
            with pytest.raises(ValueError, match="slot and a reader"):
                Pager(files.layers, [], files.mappings, **keywords)
        with pytest.raises(ValueError, match="multiple of 4096"):
            Pager(files.layers, [], files.mappings, 1, read_bytes=1000)
        with pytest.raises(AddressSpaceError, match="mapped 0 times"):
            Pager(files.layers, [], {}, 1)
        files.check(0)
        with Pager(files.layers, [], files.mappings, 1) as pager:
            for index in (-1, 1):
                with pytest.raises(IndexError):
                    pager.enter(index)


def test_a_missing_file_leaves_nothing_open(tmp_path: Path) -> None:
    with mapped(page_weights(tmp_path)) as files:
        (tmp_path / "shard-0.bin").unlink()
        gc.collect()
        before = n_open_files()
        with pytest.raises(StorageError, match="cannot open"):
            Pager(files.layers, [], files.mappings, 2)
        gc.collect()
        assert n_open_files() == before
        assert bytes_in(files.ranges.values()) == 0
