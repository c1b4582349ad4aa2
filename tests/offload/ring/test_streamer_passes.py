"""Aborted passes, waiting, and closing: the next pass starts afresh."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import numpy as np
import pytest
from streaming import Gate, reader_threads, small_weights, uneven_sizes
from weight_files import FaultyReads, write_weights

from offload.ring.streamer import (
    StreamerClosed,
    WeightStreamer,
)
from offload.storage.aligned import ALIGNMENT

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("n_slots", [1, 2, 3, 5])
@pytest.mark.parametrize("stop", range(6))
def test_an_aborted_pass_restarts(tmp_path: Path, n_slots: int, stop: int) -> None:
    weights = write_weights(tmp_path, uneven_sizes(6, stop), resident=lambda i, j: i in (0, 3))
    with WeightStreamer(weights.layers, n_slots, read_bytes=PAGE, poison=True) as streamer:
        for explicit in (False, True):
            weights.run_passes(streamer, 2, stop_before=stop)
            if explicit:
                streamer.restart()
            weights.run_passes(streamer)
        assert streamer.stats.passes == 4 if stop else 2


def test_any_layer_may_be_asked_for(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(7, 1), resident=lambda i, j: i in (0, 6))
    rng = random.Random(0)
    with WeightStreamer(weights.layers, 3, read_bytes=PAGE, poison=True) as streamer:
        for _ in range(200):
            index = rng.randrange(7)
            with streamer.layer(index) as tensors:
                weights.check(index, tensors)


def test_an_exception_in_the_with_block_releases_the_slot(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with WeightStreamer(weights.layers, 1, poison=True) as streamer:
        for index in range(5):
            with pytest.raises(ZeroDivisionError), streamer.layer(index):
                raise ZeroDivisionError
        assert streamer.stats.passes == 0
        weights.run_passes(streamer, 2)


def test_a_restart_releases_acquired_slots(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    with WeightStreamer(weights.layers, 2) as streamer:
        pinnable = streamer.layer(0)  # never released, as after an interrupt between two lines
        pinnable.__enter__()
        streamer.restart()
        weights.run_passes(streamer, 2)
        pinnable.__exit__(None, None, None)
        weights.run_passes(streamer, 2)


def test_no_restart_is_made_where_none_is_needed(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, uneven_sizes(5, 3))
    reads = FaultyReads()
    with WeightStreamer(weights.layers, 5, storage=reads.storage) as streamer:
        weights.run_passes(streamer)
        streamer.restart()
        weights.run_passes(streamer)
        n_bytes = sum(layer.slot_bytes for layer in weights.layers)
        assert streamer.stats.bytes_read <= 3 * n_bytes


def test_layers_may_be_nested_as_deep_as_the_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000], [5000], [12_000]])
    with WeightStreamer(weights.layers, 2, poison=True) as streamer:
        with streamer.layer(0) as first, streamer.layer(1) as second:
            weights.check(0, first)
            weights.check(1, second)
            with pytest.raises(RuntimeError, match="2 slots"), streamer.layer(2):
                pass
            with pytest.raises(RuntimeError, match="out of order"), streamer.layer(0):
                pass
            weights.check(0, first)
        weights.run_passes(streamer, 2)


def test_closing_while_the_caller_waits(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(0)
    streamer = WeightStreamer(weights.layers, 2, storage=gate.storage)
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            with streamer.layer(0):
                pass
        except BaseException as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    gate.reached.wait()
    closing = threading.Thread(target=streamer.close)
    closing.start()
    waiting.join()
    assert isinstance(caught[0], StreamerClosed)
    gate.opened.set()
    closing.join()


@pytest.mark.parametrize("n_open", [0, 1, 5, 10])
def test_closing_while_readers_are_busy(tmp_path: Path, n_open: int) -> None:
    weights = small_weights(tmp_path)
    gate = Gate(n_open)
    streamer = WeightStreamer(weights.layers, 5, read_bytes=PAGE, n_readers=4, storage=gate.storage)
    gate.reached.wait()
    threading.Timer(0.05, gate.opened.set).start()
    streamer.close()
    streamer.close()
    assert not reader_threads()
    with pytest.raises(StreamerClosed), streamer.layer(0):
        pass
    streamer.restart()


def test_a_view_that_outlives_the_streamer_is_safe(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 5000]], resident=lambda i, j: j == 0)
    streamer = WeightStreamer(weights.layers, 1)
    with streamer.layer(0) as tensors:
        arrays = [np.frombuffer(view, np.uint8) for view in tensors.values()]
        streamer.close()
        assert [bytes(a) for a in arrays] == list(weights.contents.values())


def test_a_read_that_never_returns_does_not_block_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.ring.cursor.JOIN_SECONDS", 0.01)
    weights = small_weights(tmp_path)
    gate = Gate(0)
    streamer = WeightStreamer(weights.layers, 2, storage=gate.storage)
    gate.reached.wait()
    streamer.close()
    gate.opened.set()  # the late read writes to memory that still exists
    for thread in reader_threads():
        thread.join()


def test_a_forgotten_streamer_ends_its_threads(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    streamer = WeightStreamer(weights.layers, 2)
    weights.run_passes(streamer)
    del streamer
    gc.collect()
    for thread in reader_threads():
        thread.join(5)
    assert not reader_threads()


def test_a_close_while_the_files_are_checked_is_no_fault_of_the_files(tmp_path: Path) -> None:
    weights = small_weights(tmp_path)
    with WeightStreamer(weights.layers, 2) as streamer:
        supply = streamer._cursor._supply
        assert supply is not None
        check = supply.check_unchanged

        def close_and_check() -> None:
            streamer.close()
            check()

        supply.check_unchanged = close_and_check  # type: ignore[method-assign]
        with pytest.raises(StreamerClosed):
            weights.run_passes(streamer)
