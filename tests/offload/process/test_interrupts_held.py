"""Ctrl-C anywhere while layers are held and let go, and in the repair: the next pass is right."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from interrupting import files_of, interrupted
from mapped_weights import mapped
from streaming import uneven_sizes
from weight_files import write_weights

from offload.paging.pager import Pager
from offload.ring.streamer import WeightStreamer
from offload.storage import aligned

pytestmark = pytest.mark.usefixtures("no_thread_is_left")
HANG_SECONDS = 60.0
N_LAYERS = 5


def interrupted_walk(lender: Pager | WeightStreamer, first: int, then: int | None) -> list[str]:
    """A pass in which layers are held, and the repair; the places of the interrupts."""
    with interrupted(first, then) as interrupts:
        try:
            lender.hold(2)
            for index in range(N_LAYERS):
                lender.enter(index)
                lender.leave(index)
            lender.hold(0)
        except KeyboardInterrupt:
            lender.restart()
            raise
    return interrupts.places


@pytest.mark.parametrize("is_paged", [False, True])
def test_an_interrupt_at_every_call(
    tmp_path: Path, is_paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aligned, "_STEP_BYTES", aligned.ALIGNMENT)  # memory comes in many steps
    weights, places = write_weights(tmp_path, uneven_sizes(N_LAYERS, 1)), set()
    with mapped(weights) as files:
        lender = (
            Pager(files.layers, [], files.mappings, 2)
            if is_paged
            else WeightStreamer(weights.layers, 2, poison=True)
        )
        walk = files.walk if is_paged else weights.walk
        with lender:
            watchdog = threading.Timer(HANG_SECONDS, lender.close)  # a hang raises StreamerClosed
            watchdog.start()
            for first in range(1, 2000, 2):
                found = interrupted_walk(lender, first, 1 + first % 23)
                places.update(found)
                lender.restart()
                assert lender.n_held <= 2
                walk(lender)
                lender.hold(0)
                assert lender.n_held == 0
                if not found:
                    break
            watchdog.cancel()
            watchdog.join()
    assert {"holding.py", "order.py", "slots.py", "walk.py"} <= files_of(places)
