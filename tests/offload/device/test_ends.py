"""Ctrl-C anywhere, and closing at any time: all memory is freed, and no pass is wrong."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from fake_device import FakeDevice
from streaming import Gate, reader_threads, small_weights
from tiered import DEVICE, HOST, POLICIES, STORAGE, run_passes, streaming, tiered

from offload.device.streamer import DeviceStreamer
from offload.ring.slots import StreamerClosed
from offload.storage.aligned import ALIGNMENT

PAGE = ALIGNMENT
pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt in a generator that is being collected is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
MIXED = [STORAGE, HOST, STORAGE, DEVICE, STORAGE]
HANG_SECONDS = 60.0


# --- closing --------------------------------------------------------------------------------------


def test_closing_in_the_midst_of_everything(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    for stop_before in range(5):
        for policies in POLICIES:
            device = FakeDevice(*policies)
            with streaming(tiered(weights, lambda i, j: MIXED[i]), device) as streamer:
                run_passes(streamer, device, weights, 2, stop_before=stop_before)
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
        run_passes(streamer, device, weights)
    gate.opened.set()
    closing.join()
    assert (device.n_allocated, device.n_pinned) == (0, 0)


def test_a_forgotten_streamer_ends_its_threads(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    device = FakeDevice()
    streamer = DeviceStreamer(tiered(weights, lambda i, j: STORAGE), device, read_bytes=PAGE)
    run_passes(streamer, device, weights)
    threads = reader_threads()
    assert threads
    del streamer
    gc.collect()
    for thread in threads:
        thread.join(10)
        gc.collect()
    assert not reader_threads()
