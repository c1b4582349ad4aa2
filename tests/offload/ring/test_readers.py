"""Threads that fail to start: their resources are released."""

from __future__ import annotations

import gc
import threading
from pathlib import Path

import pytest
from fake_device import FakeDevice
from open_files import n_open_files
from streaming import reader_threads, small_weights
from system_probes import needs_address_limit
from tiered import STORAGE, tiered

from offload.device.streamer import DeviceStreamer
from offload.errors import SpecdecError
from offload.ring.streamer import WeightStreamer

pytestmark = [pytest.mark.usefixtures("no_thread_is_left"), needs_address_limit]

_NO_STACK_BYTES = 2**46  # more memory than exists: the system starts no such thread


@pytest.fixture(params=["specdec-reader-0", "specdec-reader-2", "specdec-copier"])
def refused(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the system refuse to start the thread of this name."""
    start = threading.Thread.start

    def start_or_fail(thread: threading.Thread) -> None:
        before = threading.stack_size(_NO_STACK_BYTES if thread.name == request.param else 0)
        try:
            start(thread)
        finally:
            threading.stack_size(before)

    monkeypatch.setattr(threading.Thread, "start", start_or_fail)


@pytest.mark.usefixtures("refused")
def test_a_device_and_its_host_get_everything_back(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gc.collect()
    n_files = n_open_files()
    device = FakeDevice()
    with pytest.raises((SpecdecError, RuntimeError), match="can't start new thread"):
        DeviceStreamer(tiered(weights, lambda i, j: STORAGE), device, n_readers=3)
    assert (device.n_allocated, device.n_pinned) == (0, 0)
    assert not reader_threads()
    assert n_open_files() == n_files


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("refused", ["specdec-reader-2"], indirect=True)
def test_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SpecdecError, match="thread 3 of 4 .*io.threads"):
        WeightStreamer(small_weights(tmp_path).layers, 2, n_readers=4)
    assert not reader_threads()
