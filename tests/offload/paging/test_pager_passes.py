"""Aborted passes, at any moment, lose no page."""

from __future__ import annotations

from pathlib import Path

import pytest
from mapped_weights import mapped
from paging import PAGE
from streaming import uneven_sizes
from weight_files import write_weights

from offload.paging.pager import Pager

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(6))
def test_an_aborted_pass_restarts(tmp_path: Path, n_slots: int, stop: int) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(6, stop, limit=60_000), resident=lambda i, j: i in (0, 3)
    )
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, n_slots, read_bytes=PAGE, poison=True) as pager,
    ):
        for explicit in (False, True):
            files.run_passes(pager, 2, stop_before=stop)
            if explicit:
                pager.restart()
            files.run_passes(pager)
        assert pager.stats.passes == 4 if stop else 2


def test_a_restart_releases_acquired_slots(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3, limit=60_000))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        pager.enter(0)
        pager.enter(1)
        files.check(0)
        files.check(1)
        pager.restart()
        for index in range(5):
            files.check_absent(index)
        files.run_passes(pager, 2)
        pager.leave(0)
        pager.leave(1)
        files.run_passes(pager, 2)
        assert pager.stats.passes == 4


def test_layers_may_be_nested_as_deep_as_the_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[29_000], [25_000], [12_000]])
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 2, poison=True) as pager,
    ):
        with pager.layer(0), pager.layer(1):
            with pytest.raises(RuntimeError, match="2 slots"):
                pager.enter(2)
            with pytest.raises(RuntimeError, match="out of order"):
                pager.enter(0)
            files.check(0)
            files.check(1)
        files.run_passes(pager, 2)


def test_an_exception_in_the_block_counts_no_pass(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3, limit=60_000))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 1, poison=True) as pager,
    ):
        for index in range(5):
            with pytest.raises(ZeroDivisionError), pager.layer(index):
                raise ZeroDivisionError
            files.check_absent(index)
        assert pager.stats.passes == 0
        files.run_passes(pager, 2)
        assert pager.stats.passes == 2
