"""The mapping of a file when its pager has ended, or was refused."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from mapped_weights import mapped
from mapped_weights import memory_in as bytes_in
from paging import page_weights, slot_ranges
from streaming import reader_threads

from offload.paging.address_space import AddressSpaceError
from offload.paging.pager import Pager

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


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


def test_a_closed_pager_leaves_later_mappings_alone(tmp_path: Path) -> None:
    weights = page_weights(tmp_path)
    with mapped(weights) as files:
        pager = Pager(files.layers, [], files.mappings, 2)
        pager.enter(0)
        pager.close()
    with mapped(weights) as files:  # at the same addresses, as a rule
        pager.leave(0)
        pager.restart()
        pager.close()
        del pager
        gc.collect()
        for index in range(5):
            files.check(index)


def test_a_mapping_is_left_alone_where_arguments_are_refused(tmp_path: Path) -> None:
    with mapped(page_weights(tmp_path)) as files:
        for keywords in ({"n_slots": 0}, {"n_slots": 1, "n_readers": 0}):
            with pytest.raises(ValueError, match="slot and a reader"):
                Pager(files.layers, [], files.mappings, **keywords)
        with pytest.raises(ValueError, match="multiple of 4096"):
            Pager(files.layers, [], files.mappings, 1, read_bytes=1000)
        with pytest.raises(AddressSpaceError, match="mapped 0 times"):
            Pager(files.layers, [], {}, 1)
        for index in range(5):
            files.check(index)
