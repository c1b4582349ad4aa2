"""Other threads run while memory is committed."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from system_probes import needs_advice

from offload.paging.address_space import commit, reserve, unmap
from offload.storage import aligned
from offload.storage.aligned import AlignedBuffer
from offload.units import MIB

N_BYTES = 512 * MIB


@contextmanager
def buffered() -> Iterator[None]:
    buffer = AlignedBuffer(N_BYTES)
    yield
    buffer.close()


@contextmanager
def mapped() -> Iterator[None]:
    address = reserve(N_BYTES)
    try:
        commit(address, N_BYTES)
        yield
    finally:
        unmap(address, N_BYTES)


@pytest.fixture(params=[buffered, mapped])
def committed(request: pytest.FixtureRequest) -> Callable[[], None]:
    def commit_once() -> None:
        with request.param():
            pass

    return commit_once


@pytest.fixture(params=[True, False], ids=["kernel", "old kernel"])
def _populates(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not request.param:
        monkeypatch.setattr(aligned, "_MADV_POPULATE_WRITE", 9999)  # the advice is unknown


@needs_advice
@pytest.mark.usefixtures("_populates")
def test_other_threads_run_meanwhile(committed: Callable[[], None]) -> None:
    """One turn may fall in between, whoever holds the interpreter lock."""
    turns: list[float] = []
    has_begun, is_over = threading.Event(), threading.Event()

    def look() -> None:
        has_begun.set()
        while not is_over.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.001)  # gives the lock back

    thread = threading.Thread(target=look)
    thread.start()
    has_begun.wait()
    began = time.perf_counter()
    committed()
    ended = time.perf_counter()
    is_over.set()
    thread.join()
    assert len([turn for turn in turns if began < turn < ended]) >= 3
