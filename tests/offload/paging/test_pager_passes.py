"""Passes that are given up, at any moment, lose no page."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from mapped_weights import mapped
from paging import PAGE, check_memory
from streaming import uneven_sizes
from weight_files import write_weights

from offload.paging.pager import Pager

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(6))
def test_an_aborted_pass_begins_anew(tmp_path: Path, n_slots: int, stop: int) -> None:
    weights = write_weights(
        tmp_path, uneven_sizes(6, stop, most=60_000), resident=lambda i, j: i in (0, 3)
    )
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, n_slots, read_bytes=PAGE, poison=True) as pager,
    ):
        for explicit in (False, True):
            files.walk(pager, 2, stop_before=stop)
            if explicit:
                pager.restart()
            files.walk(pager)
        assert pager.stats.passes == 4 if stop else 2


def test_a_restart_takes_back_what_is_lent(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3, most=60_000))
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
        files.walk(pager, 2)
        pager.leave(0)
        pager.leave(1)
        files.walk(pager, 2)
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
        files.walk(pager, 2)


def test_an_exception_in_the_block_counts_no_pass(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3, most=60_000))
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, 1, poison=True) as pager,
    ):
        for index in range(5):
            with pytest.raises(ZeroDivisionError), pager.layer(index):
                raise ZeroDivisionError
            files.check_absent(index)
        assert pager.stats.passes == 0
        files.walk(pager, 2)
        assert pager.stats.passes == 2


class Alarm(BaseException):
    pass


def assert_unlocked(error: RuntimeError) -> None:
    if "unlocked lock" not in str(error):
        raise error


def disarm() -> None:
    while True:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
            return
        except Alarm:
            continue


def test_an_interrupt_at_any_moment_loses_no_page(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3, most=60_000), resident=lambda i, j: j == 2)

    def ring(*_: object) -> None:
        raise Alarm

    rng = random.Random(0)
    n_rung = 0
    previous = signal.signal(signal.SIGALRM, ring)
    try:
        with (
            mapped(weights) as files,
            Pager(files.layers, [], files.mappings, 2, read_bytes=4 * PAGE, poison=True) as pager,
        ):
            for number in range(150):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-3))
                    files.walk(pager)
                    disarm()
                except Alarm:  # it rings once
                    n_rung += 1
                except RuntimeError as error:
                    # A Condition whose wait is interrupted while it takes its lock again.
                    assert_unlocked(error)
                if number % 2:
                    pager.restart()
                    for index in range(5):
                        files.check_absent(index)
                else:
                    for index in range(5):
                        pager.leave(index)
                files.walk(pager)
                check_memory(pager, files)
    finally:
        disarm()
        signal.signal(signal.SIGALRM, previous)
    assert n_rung > 0
