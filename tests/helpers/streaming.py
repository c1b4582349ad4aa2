"""Shared helpers of the weight streamer and pager tests."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from weight_files import FaultyReads, Weights, write_weights

from offload.ring.layer_access import LayerAccess


def reader_threads() -> list[threading.Thread]:
    """Return the threads that fill rings, on host or device, or load memory in the background."""
    names = ("specdec-reader", "specdec-copier", "specdec-load")
    return [t for t in threading.enumerate() if t.name.startswith(names)]


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    _let_threads_end()  # an earlier test of another package may have left a model to the collector
    yield
    _let_threads_end()
    assert not reader_threads()


def _let_threads_end() -> None:
    if reader_threads():
        gc.collect()
    for thread in reader_threads():
        thread.join(5)


class Gate:
    """Storage whose reads from call `n_open` on wait until the gate is opened."""

    def __init__(self, n_open: int) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()
        self.n_open = n_open
        self.storage = FaultyReads(self._fault).storage

    def _fault(self, call: int, length: int) -> None:
        if call >= self.n_open and not self.opened.is_set():
            self.reached.set()
            self.opened.wait()


def wait_for_failure(layer_access: LayerAccess) -> None:
    """Wait until a read-ahead has failed."""
    while layer_access._cursor._ring.failure is None:
        time.sleep(0.001)


def uneven_sizes(n_layers: int, seed: int, limit: int = 9000) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randint(1, limit) for _ in range(rng.randint(1, 3))] for _ in range(n_layers)]


def small_weights(folder: Path) -> Weights:
    return write_weights(folder, [[9000, 100], [5000], [12_000], [300], [8000]], n_files=2)
