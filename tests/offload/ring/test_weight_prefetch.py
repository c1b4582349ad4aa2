"""Weights that are read before the plan is known: taken where it asks for them, else given back."""

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
from offload.ring.weight_prefetch import RequestedWeights, WeightPrefetch
from offload.storage.aligned import AlignedBuffer
from offload.storage.pausable import PausableReads

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    sizes = [[*layer, 20_000] for layer in uneven_sizes(6, 3, limit=30_000)]
    return write_weights(tmp_path, sizes, n_files=2, resident=lambda i, j: i % 2 == 0)


def requested_of(weights: Weights) -> RequestedWeights:
    """The last layer's tensors stand for those outside of the layers."""
    return RequestedWeights(weights.layers[-1].tensors, weights.layers, n_slots=2)


def unchanged() -> None:
    pass


def test_what_is_wanted_is_taken(weights: Weights) -> None:
    requested = requested_of(weights)
    weight_prefetch = WeightPrefetch(requested, unchanged)
    taken = weight_prefetch.take(requested)
    assert taken is not None
    weight_prefetch.close()  # of what was taken nothing is given back
    weights.run_passes(taken.layers, 2)
    weights.check(
        len(weights.layers) - 1, {r.name: taken.non_layer[r.name] for r in requested.non_layer}
    )
    taken.close()


def test_anything_else_is_given_back(weights: Weights) -> None:
    requested = requested_of(weights)
    before = n_open_files()
    for other in (
        replace(requested, n_slots=3),
        replace(requested, n_readers=1),
        replace(requested, non_layer=requested.non_layer[1:]),
        replace(requested, layers=requested.layers[:-1]),
        replace(requested, layers=tuple(layer.with_resident(()) for layer in requested.layers)),
    ):
        weight_prefetch = WeightPrefetch(requested, unchanged)
        assert weight_prefetch.take(other) is None
        with weight_prefetch.paused() as n_bytes:
            assert n_bytes == 0
    assert n_open_files() == before


def test_a_file_that_is_another_one_by_now_is_read_anew(weights: Weights) -> None:
    def changed() -> None:
        raise CheckpointError("replaced")

    requested = requested_of(weights)
    assert WeightPrefetch(requested, changed).take(requested) is None


def test_a_file_that_cannot_be_read_is_for_the_next_one_to_tell(weights: Weights) -> None:
    requested = requested_of(weights)
    os.remove(weights.layers[0].tensors[0].path)
    assert WeightPrefetch(requested, unchanged).take(requested) is None


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
        assert n_bytes == 8192  # the one that was running has ended
        third.start()
        third.join(0.05)
        assert third.is_alive()
    third.join(10)
    with reads.paused() as n_bytes:
        assert n_bytes == 12288
    file.close()


def test_records_are_compared_and_not_only_their_names(weights: Weights) -> None:
    requested = requested_of(weights)
    first = requested.non_layer[0]
    moved = TensorRecord(
        first.name, first.dtype, first.shape, first.path, first.offset + 1, first.n_bytes
    )
    other = replace(requested, non_layer=(moved, *requested.non_layer[1:]))
    assert WeightPrefetch(requested, unchanged).take(other) is None
