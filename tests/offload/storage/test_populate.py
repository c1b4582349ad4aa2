"""Other threads run while memory is committed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from system_probes import needs_advice

from offload.paging.address_space import commit, reserve, unmap
from offload.process.memory import process_memory
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
    """One earlier poll may fall in between, whoever holds the interpreter lock."""
    seen: set[int] = set()
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            seen.add(process_memory().anonymous_bytes // MIB)

    before = process_memory().anonymous_bytes // MIB
    thread = threading.Thread(target=look)
    thread.start()
    committed()
    is_over.set()
    thread.join()
    assert len([n for n in seen if before + 16 < n < before + 496]) >= 3
