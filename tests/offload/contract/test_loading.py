"""Resident weights are read during the first pass: none is used before it is loaded."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path

import pytest
from layer_suppliers import SuppliedLayers, n_open_files
from weight_files import FaultyReads, Weights, write_weights

from offload.storage.direct_io import DirectFile, StorageError, pread_into

Kind = type[SuppliedLayers]
N_LAYERS = 6


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    return write_weights(tmp_path, [[9000, 20_000]] * N_LAYERS, resident=lambda i, j: True)


class HeldBack:
    """Reads of what only layers from `first` on need wait until `opened`."""

    def __init__(self, weights: Weights, first: int) -> None:
        self.opened, self.reached = threading.Event(), threading.Event()
        self._needed = [r for layer in weights.layers[:first] for r in layer.tensors]
        self.storage = partial(DirectFile, read_at=self._read)

    def _read(self, descriptor: int, view: memoryview, offset: int) -> int:
        end = offset + len(view)
        if not any(r.offset < end and offset < r.offset + r.n_bytes for r in self._needed):
            self.reached.set()
            self.opened.wait()
        return pread_into(descriptor, view, offset)


def test_a_layer_is_there_before_those_after_it_are_read(weights: Weights, kind: Kind) -> None:
    reads = HeldBack(weights, 2)
    with kind(weights, 0, n_readers=1, storage=reads.storage) as layers:
        layers.run_passes(stop_before=2)
        assert layers.access.unread_bytes > 0
        reads.opened.set()
        layers.run_passes(2)
        assert layers.access.unread_bytes == 0


def test_they_are_read_once_and_the_files_closed(weights: Weights, kind: Kind) -> None:
    reads = FaultyReads()
    n_files = n_open_files()
    with kind(weights, 0, storage=reads.storage) as layers:
        layers.run_passes()
        assert n_open_files() == n_files
        n_first = reads.n_calls
        layers.run_passes(2)
        assert reads.n_calls == n_first


def test_an_overwritten_file_ends_the_first_pass(weights: Weights, kind: Kind) -> None:
    reads = HeldBack(weights, N_LAYERS - 1)
    with kind(weights, 0, storage=reads.storage) as layers:
        layers.run_passes(stop_before=2)
        os.utime(weights.layers[0].tensors[0].path, ns=(1, 1))
        reads.opened.set()
        for _ in range(2):
            with pytest.raises(StorageError, match="changed while in use"):
                layers.run_passes()
        assert layers.access.stats.passes == 0
