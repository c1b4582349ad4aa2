"""Weights read before the plan is known: used where it needs them, otherwise freed."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from open_files import n_open_files
from streaming import Gate, uneven_sizes
from weight_files import Weights, write_weights

from offload.formats.tensors import CheckpointError, TensorRecord
from offload.ring.weight_prefetch import WeightPrefetch, WeightSelection
from offload.storage.aligned import AlignedBuffer
from offload.storage.pausable import PausableReads

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    sizes = [[*layer, 20_000] for layer in uneven_sizes(6, 3, limit=30_000)]
    return write_weights(tmp_path, sizes, n_files=2, resident=lambda i, j: i % 2 == 0)


def selection_of(weights: Weights) -> WeightSelection:
    """The last layer's tensors stand for the non-layer weights."""
    return WeightSelection(weights.layers[-1].tensors, weights.layers, n_slots=2)


def unchanged() -> None:
    pass


def test_what_is_wanted_is_taken(weights: Weights) -> None:
    expected = selection_of(weights)
    weight_prefetch = WeightPrefetch(expected, unchanged)
    taken = weight_prefetch.take(expected)
    assert taken is not None
    weight_prefetch.close()  # used weights are not freed
    weights.run_passes(taken.layers, 2)
    weights.check(
        len(weights.layers) - 1, {r.name: taken.non_layer[r.name] for r in expected.non_layer}
    )
    taken.close()


def test_anything_else_is_given_back(weights: Weights) -> None:
    expected = selection_of(weights)
    before = n_open_files()
    for other in (
        replace(expected, n_slots=3),
        replace(expected, n_readers=1),
        replace(expected, non_layer=expected.non_layer[1:]),
        replace(expected, layers=expected.layers[:-1]),
        replace(expected, layers=tuple(layer.with_resident(()) for layer in expected.layers)),
    ):
        weight_prefetch = WeightPrefetch(expected, unchanged)
        assert weight_prefetch.take(other) is None
        with weight_prefetch.paused() as n_bytes:
            assert n_bytes == 0
    assert n_open_files() == before


def test_a_replaced_file_is_read_again(weights: Weights) -> None:
    def changed() -> None:
        raise CheckpointError("replaced")

    expected = selection_of(weights)
    assert WeightPrefetch(expected, changed).take(expected) is None


def test_a_file_that_cannot_be_read_is_for_the_next_one_to_tell(weights: Weights) -> None:
    expected = selection_of(weights)
    os.remove(weights.layers[0].tensors[0].path)
    assert WeightPrefetch(expected, unchanged).take(expected) is None


def test_nothing_is_read_during_a_pause(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(16384))
    gate = Gate(n_open=1)
    reads = PausableReads(gate.storage)
    file, memory = reads.open(path), AlignedBuffer(4096)
    page = memory.view[:4096]
    file.read_into(page, 0)
    second = threading.Thread(target=file.read_into, args=(page, 4096))
    second.start()
    gate.reached.wait(10)
    threading.Timer(0.05, gate.opened.set).start()
    third = threading.Thread(target=file.read_into, args=(page, 8192))
    with reads.paused() as n_bytes:
        second.join(10)
        assert n_bytes == 8192  # the running read has ended
        third.start()
        third.join(0.05)
        assert third.is_alive()
    third.join(10)
    with reads.paused() as n_bytes:
        assert n_bytes == 12288
    file.close()


def test_records_are_compared_and_not_only_their_names(weights: Weights) -> None:
    expected = selection_of(weights)
    first = expected.non_layer[0]
    moved = TensorRecord(
        first.name, first.dtype, first.shape, first.path, first.offset + 1, first.n_bytes
    )
    other = replace(expected, non_layer=(moved, *expected.non_layer[1:]))
    assert WeightPrefetch(expected, unchanged).take(other) is None
