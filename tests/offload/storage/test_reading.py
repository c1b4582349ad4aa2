"""Tensors read into memory for good: Ctrl-C and errors end every read before the call ends."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from interrupting import interrupted
from weight_files import FaultyReads, Weights, write_weights

from offload.storage import reading
from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError
from offload.storage.reading import ResidentWeights, load_resident, resident_footprint

pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt inside of what is being dropped is reported, not raised.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return write_weights(tmp_path, [[70_000, 5, 0, 8192]], n_files=2)


def load(weights: Weights, reads: FaultyReads | None = None, **options) -> ResidentWeights:
    storage = (reads or FaultyReads()).storage
    records = weights.layers[0].tensors
    return load_resident(records, read_bytes=ALIGNMENT, storage=storage, **options)


def check_and_close(weights: Weights, loaded: ResidentWeights) -> None:
    weights.check(0, {name: loaded[name] for name in weights.contents})
    loaded.close()


def test_load_resident(weights: Weights) -> None:
    loaded = load(weights)
    assert loaded.n_bytes == resident_footprint(weights.layers[0].tensors)
    assert len(loaded) == 4
    check_and_close(weights, loaded)
    empty = load_resident([])
    assert (len(empty), empty.n_bytes) == (0, 0)
    empty.close()


def test_progress_counts_up_to_all_bytes(weights: Weights) -> None:
    seen: list[tuple[int, int]] = []
    load(weights, progress=lambda done, total: seen.append((done, total))).close()
    done, totals = zip(*seen, strict=True)
    assert list(done) == sorted(done)
    assert set(totals) == {done[-1]}
    assert done[-1] >= sum(len(content) for content in weights.contents.values())


def test_an_error_of_progress_ends_the_reading(weights: Weights) -> None:
    def progress(done: int, total: int) -> None:
        raise ValueError("no terminal")

    with pytest.raises(ValueError, match="no terminal"):
        load(weights, progress=progress)


@pytest.mark.parametrize("when", [0, 5, -1])
def test_a_file_that_is_overwritten_meanwhile(weights: Weights, when: int) -> None:
    counting = FaultyReads()
    load(weights, counting).close()
    paths = {record.path for record in weights.layers[0].tensors}

    def overwrite(call: int, length: int) -> None:
        if call == when % counting.n_calls:
            for path in paths:
                with path.open("r+b") as file:
                    file.write(b"new")
                os.utime(path, ns=(1, 1))  # a clock tick later, whatever the clock's resolution

    with pytest.raises(StorageError, match="was changed while in use"):
        load(weights, FaultyReads(overwrite))


def test_an_interrupt_at_every_call(weights: Weights) -> None:
    places: set[str] = set()
    for first in range(1, 1000):
        reads = FaultyReads()
        with interrupted(first) as interrupts:
            load(weights, reads).close()
        n_calls = reads.n_calls
        places.update(interrupts.places)
        check_and_close(weights, load(weights))
        assert reads.n_calls == n_calls, "a read began after the end"
        if not interrupts.places:
            break
    assert {"reading.py:bring_pieces", "reading.py:_next_result"} <= places


def test_ctrl_c_gives_up_the_reads_that_have_not_begun(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that has begun is waited for: it uses the memory."""
    given_up, finished = threading.Event(), []

    class Pool(ThreadPoolExecutor):
        def shutdown(self, **options: bool) -> None:  # type: ignore[override]
            super().shutdown(wait=False, **options)
            given_up.set()
            super().shutdown()

    def press(call: int, length: int) -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert given_up.wait(10)
        finished.append(call)

    monkeypatch.setattr(reading, "ThreadPoolExecutor", Pool)
    with pytest.raises(KeyboardInterrupt):
        load(weights, FaultyReads(press), n_readers=1)
    assert finished == [0]
