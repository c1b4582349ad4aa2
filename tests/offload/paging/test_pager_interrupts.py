"""Ctrl-C anywhere in the pager, once and again during the repair: the next pass is right."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from interrupting import files_of, interrupted
from mapped_weights import mapped
from streaming import uneven_sizes
from weight_files import write_weights

from offload.paging.pager import Pager

pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt inside of a generator that is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HANG_SECONDS = 60.0


def interrupted_walk(pager: Pager, first: int, then: int | None) -> list[str]:
    """One pass and the repair after it, interrupted; the places of the interrupts."""
    with interrupted(first, then) as interrupts:
        try:
            for index in range(4):
                pager.enter(index)
                pager.leave(index)
        except KeyboardInterrupt:
            pager.restart()
            raise
    return interrupts.places


@pytest.mark.parametrize("n_slots", [1, 2])
def test_an_interrupt_at_every_call_and_in_the_repair(tmp_path: Path, n_slots: int) -> None:
    places: set[str] = set()
    with (
        mapped(write_weights(tmp_path, uneven_sizes(4, 1))) as files,
        Pager(files.layers, [], files.mappings, n_slots) as pager,
    ):
        watchdog = threading.Timer(HANG_SECONDS, pager.close)  # a hang raises StreamerClosed
        watchdog.start()
        for first in range(1, 2000):
            for then in range(1, 60):
                found = interrupted_walk(pager, first, then)
                pager.restart()
                files.walk(pager)
                places.update(found)
                if len(found) < 2:
                    break
            if not found:
                break
        watchdog.cancel()
        watchdog.join()
    assert {"lending.py", "slots.py", "walk.py"} <= files_of(places)


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    for first in range(1, 1000):
        with mapped(weights) as files:
            pager = Pager(files.layers, [], files.mappings, 2)
            files.walk(pager)
            slots = pager._walk._ring.slots
            with interrupted(first) as interrupts:
                pager.close()
            pager.close()
            assert not any(slot.buffer._n_reserved for slot in slots)
            if not interrupts.places:
                break
