"""Tensors read into memory for good: Ctrl-C and errors end every read before the call ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from weight_files import FaultyReads, Weights, write_weights

from offload.storage.aligned import ALIGNMENT
from offload.storage.direct_io import StorageError
from offload.storage.reading import ResidentWeights, load_resident, resident_footprint

pytestmark = [
    pytest.mark.usefixtures("no_thread_is_left"),
    # An interrupt in an object that is being collected is reported, not raised.
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


@pytest.mark.parametrize("failing", [0, 2, 5])
def test_a_read_that_fails_ends_the_reading(weights: Weights, failing: int) -> None:
    def fault(call: int, length: int) -> None:
        if call == failing:
            raise OSError(5, "Input/output error")

    with pytest.raises(StorageError, match="Input/output error"):
        load(weights, FaultyReads(fault))


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
