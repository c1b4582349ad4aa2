"""Ctrl-C anywhere in the streamer, once and again during the repair: the next pass is right."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from interrupting import files_of, interrupted
from streaming import Gate, small_weights, uneven_sizes
from weight_files import write_weights

from offload.ring.slots import SlotState
from offload.ring.streamer import WeightStreamer

pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt inside of a generator that is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
HANG_SECONDS = 60.0


@contextmanager
def unhung(streamer: WeightStreamer) -> Iterator[None]:
    """A wait that would never end raises StreamerClosed instead."""
    watchdog = threading.Timer(HANG_SECONDS, streamer.close)
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()
        watchdog.join()


def interrupted_walk(
    streamer: WeightStreamer, n_layers: int, first: int, then: int | None = None
) -> list[str]:
    """One pass and the repair after it, interrupted; the places of the interrupts."""
    with interrupted(first, then) as interrupts:
        try:
            for index in range(n_layers):
                with streamer.layer(index):
                    pass
        except KeyboardInterrupt:
            streamer.restart()
            raise
    return interrupts.places


def walk_until_interrupted(streamer: WeightStreamer, seconds: float) -> None:
    signal.setitimer(signal.ITIMER_REAL, seconds)
    while True:
        for index in range(6):
            with streamer.layer(index):
                pass


@pytest.mark.parametrize("n_slots", [1, 2, 4])
def test_an_interrupt_at_every_call_of_a_pass(tmp_path: Path, n_slots: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    places: set[str] = set()
    with WeightStreamer(weights.layers, n_slots, poison=True) as streamer, unhung(streamer):
        for at_call in range(1, 1000):
            found = interrupted_walk(streamer, 4, at_call)
            if not found:
                break
            places.update(found)
            streamer.restart()
            weights.walk(streamer, 2)
    assert {"lending.py", "slots.py", "streamer.py", "walk.py"} <= files_of(places)


def test_a_second_interrupt_at_every_call_of_the_repair(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    places: set[str] = set()
    with WeightStreamer(weights.layers, 2, poison=True) as streamer, unhung(streamer):
        for first in range(1, 1000, 3):
            for later in range(1, 40):
                found = interrupted_walk(streamer, 4, first, later)
                streamer.restart()
                weights.walk(streamer)
                if len(found) < 2:
                    break
                places.add(found[1])
            if not found:
                break
    assert {"lending.py", "slots.py", "walk.py"} <= files_of(places)


def test_signals_at_any_time(tmp_path: Path) -> None:
    """Real signals, which come inside of waits and between bytecodes, too."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    weights = write_weights(tmp_path, [[300_000]] * 6)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with WeightStreamer(weights.layers, 2) as streamer, unhung(streamer):
            for number in range(400):
                with pytest.raises(KeyboardInterrupt):
                    walk_until_interrupted(streamer, 1e-5 + number % 97 * 3e-5)
                streamer.restart()
                weights.walk(streamer, stop_before=2)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    for at_call in range(1, 1000):
        streamer = WeightStreamer(weights.layers, 2)
        weights.walk(streamer)
        with interrupted(at_call) as interrupts:
            streamer.close()
        streamer.close()
        for slot in streamer._walk._ring.slots:
            with pytest.raises(ValueError, match="released"):
                len(slot.buffer.view)
        if not interrupts.places:
            break


def test_a_restart_sees_what_was_taken_but_never_handed_out(tmp_path: Path) -> None:
    """The interrupt came between the ring's taking and the streamer's noting of it."""
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    with WeightStreamer(weights.layers, 2, poison=True) as streamer, unhung(streamer):
        weights.walk(streamer)
        taken = streamer._walk._ring.wait_ready(streamer._walk._ticket)
        assert taken.state is SlotState.IN_USE
        streamer.restart()
        assert not streamer._walk._ring.is_lending
        weights.walk(streamer, 2)


def test_ctrl_c_ends_a_wait_of_the_main_thread(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(0)
    streamer = WeightStreamer(weights.layers, 2, storage=gate.storage)
    gate.reached.wait()
    presser = threading.Timer(0.05, signal.raise_signal, (signal.SIGINT,))

    def wait() -> None:
        presser.start()  # the signal comes to another thread than the one that waits
        streamer._walk._ring.wait_ready(0)

    with pytest.raises(KeyboardInterrupt):  # a deaf wait would never end: the gate is shut
        wait()
    presser.join()
    gate.opened.set()
    streamer.close()
