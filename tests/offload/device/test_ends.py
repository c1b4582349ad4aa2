"""Ctrl-C anywhere, and closing at any time: all memory comes back, and no pass is wrong."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from fake_device import FakeDevice, Policy
from interrupting import interrupted
from streaming import Gate, reader_threads, small_weights, uneven_sizes
from tiered import DEVICE, HOST, POLICIES, STORAGE, streaming, tiered, walk
from weight_files import write_weights

from offload.device.streamer import DeviceStreamer
from offload.ring.slots import StreamerClosed
from offload.storage.aligned import ALIGNMENT

PAGE = ALIGNMENT
pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt inside of a generator that is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIXED = [STORAGE, HOST, STORAGE, DEVICE, STORAGE]
HANG_SECONDS = 60.0


def interrupted_walk(streamer, device, weights, first: int, then: int | None = None) -> list[str]:
    with interrupted(first, then) as interrupts:
        try:
            walk(streamer, device, weights)
        except KeyboardInterrupt:
            streamer.restart()
            raise
    return interrupts.places


@pytest.mark.parametrize("policies", [(Policy.LATE, Policy.LATE), (Policy.EARLY, Policy.LATE)])
def test_an_interrupt_at_every_call_of_a_pass(tmp_path: Path, policies) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    device = FakeDevice(*policies)
    places: set[str] = set()
    watchdog = threading.Timer(HANG_SECONDS, lambda: streamer.close())
    with streaming(tiered(weights, lambda i, j: MIXED[(i + j) % 5]), device) as streamer:
        watchdog.start()
        for at_call in range(1, 1000):
            found = interrupted_walk(streamer, device, weights, at_call)
            if not found:
                break
            places.update(found)
            streamer.restart()
            walk(streamer, device, weights, 2)
        watchdog.cancel()
    # Waits look again as often as the machine makes them, so no single place is certain.
    assert places & {"streamer.py:_lend", "streamer.py:_enter"}
    assert places & {
        "lending.py:_end",
        "walk.py:give_back",
        "slots.py:release",
        "slots.py:_free",
    }


def test_a_second_interrupt_in_the_repair(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    device = FakeDevice(Policy.EARLY, Policy.LATE)
    places: set[str] = set()
    watchdog = threading.Timer(HANG_SECONDS, lambda: streamer.close())
    with streaming(tiered(weights, lambda i, j: MIXED[(i + j) % 5]), device) as streamer:
        watchdog.start()
        for first in range(1, 1000, 4):
            found: list[str] = []
            for later in range(1, 40):
                found = interrupted_walk(streamer, device, weights, first, later)
                streamer.restart()
                walk(streamer, device, weights)
                if len(found) < 2:
                    break
                places.add(found[1])
            if not found:
                break
        watchdog.cancel()
    assert {
        "lending.py:restart",
        "walk.py:resume_at",
        "slots.py:restart",
        "slots.py:_free",
    } <= places


# --- closing --------------------------------------------------------------------------------------


def test_closing_in_the_midst_of_everything(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    for stop_before in range(5):
        for policies in POLICIES:
            device = FakeDevice(*policies)
            with streaming(tiered(weights, lambda i, j: MIXED[i]), device) as streamer:
                walk(streamer, device, weights, 2, stop_before=stop_before)
            with pytest.raises(StreamerClosed), streamer.layer(0):
                pass


def test_closing_while_the_copier_waits_for_storage(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(2)
    device = FakeDevice()
    plan = tiered(weights, lambda i, j: STORAGE)
    streamer = DeviceStreamer(plan, device, read_bytes=PAGE, n_readers=1, storage=gate.storage)
    gate.reached.wait()
    closing = threading.Thread(target=streamer.close)
    closing.start()
    with pytest.raises(StreamerClosed):
        walk(streamer, device, weights)
    gate.opened.set()
    closing.join()
    assert (device.n_allocated, device.n_pinned) == (0, 0)


def test_a_forgotten_streamer_ends_its_threads(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    device = FakeDevice()
    streamer = DeviceStreamer(tiered(weights, lambda i, j: STORAGE), device, read_bytes=PAGE)
    walk(streamer, device, weights)
    threads = reader_threads()
    assert threads
    del streamer
    gc.collect()
    for thread in threads:
        thread.join(10)
        gc.collect()
    assert not reader_threads()


def test_a_close_that_was_interrupted_can_be_repeated(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(4, 1))
    for at_call in range(1, 1000):
        device = FakeDevice()
        streamer = DeviceStreamer(tiered(weights, lambda i, j: MIXED[i]), device, read_bytes=PAGE)
        walk(streamer, device, weights)
        with interrupted(at_call) as interrupts:
            streamer.close()
        streamer.close()
        assert (device.n_allocated, device.n_pinned) == (0, 0)
        if not interrupts.places:
            break
