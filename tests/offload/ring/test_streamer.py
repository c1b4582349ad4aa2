"""The streamer's memory: resident tensors, slots, and the views of them that the caller gets.

What it shares with the pager is tested in tests/offload/contract.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from streaming import Gate
from weight_files import write_weights

from offload.ring import file_source
from offload.ring.streamer import WeightStreamer, resident_footprint
from offload.storage.aligned import ALIGNMENT, buffer_bytes

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_tensors_straddle_shards_and_are_partly_resident(tmp_path: Path) -> None:
    sizes = [[70_001, 3, 150_000, 5000, 0], [1, 2, 3, 0, 0], [90_000, 80_000, 70_000, 1, 1],
             [5000, 5000, 5000, 5000, 5000], [200_000, 1, 1, 1, 1]]  # fmt: skip
    weights = write_weights(
        tmp_path, sizes, n_files=3, resident=lambda i, j: (i + j) % 3 == 0 or i == 3
    )
    with WeightStreamer(weights.layers, 2, read_bytes=16 * PAGE, poison=True) as streamer:
        weights.run_passes(streamer, n_passes=4)
        records = [r for layer in weights.layers for r in layer.resident_records]
        assert streamer.resident_bytes == resident_footprint(records)
        assert streamer.ring_bytes == 2 * max(
            buffer_bytes(layer.slot_bytes) for layer in weights.layers
        )


def test_addresses_keep_the_files_alignment(tmp_path: Path) -> None:
    weights = write_weights(
        tmp_path, [[999, 70_000, 4096], [123, 300_000, 7]], resident=lambda i, j: j == 2
    )
    with WeightStreamer(weights.layers, 2) as streamer:
        for index, layer in enumerate(weights.layers):
            with streamer.layer(index) as tensors:
                for record in layer.tensors:
                    address = np.frombuffer(tensors[record.name], np.uint8).ctypes.data
                    assert address % PAGE == record.offset % PAGE


def test_released_slots_are_poisoned_and_nothing_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = write_weights(tmp_path, [[20_000], [30_000], [10_000]])
    gate = Gate(3)  # one read per layer: the gate shuts before the next pass
    with WeightStreamer(weights.layers, 3, storage=gate.storage, poison=True) as streamer:
        monkeypatch.setattr(file_source, "AlignedBuffer", None)  # a call would fail
        with streamer.layer(0) as tensors:
            view = tensors["layers.0.t0"]
            weights.check(0, tensors)
        assert set(bytes(view)) == {0xFF}
        gate.opened.set()
        weights.run_passes(streamer, 3)


def test_a_view_that_outlives_the_streamer_is_safe(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 5000]], resident=lambda i, j: j == 0)
    streamer = WeightStreamer(weights.layers, 1)
    with streamer.layer(0) as tensors:
        arrays = [np.frombuffer(view, np.uint8) for view in tensors.values()]
        streamer.close()
        assert [bytes(a) for a in arrays] == list(weights.contents.values())
