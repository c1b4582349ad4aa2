"""The streamer returns the correct bytes of every layer, and counts its reads."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming import Gate, reader_threads, uneven_sizes
from weight_files import FaultyReads, write_weights

from offload.ring import file_supply
from offload.ring.streamer import StreamStats, WeightStreamer, resident_footprint
from offload.storage.aligned import ALIGNMENT, buffer_bytes

PAGE = ALIGNMENT
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("n_slots", range(1, 17))
def test_every_layer_count_and_ring_depth(tmp_path: Path, n_slots: int) -> None:
    for n_layers in range(1, 17):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        weights = write_weights(folder, uneven_sizes(n_layers, 17 * n_layers + n_slots))
        with WeightStreamer(
            weights.layers, n_slots, read_bytes=PAGE, n_readers=3, poison=True
        ) as streamer:
            assert streamer.n_slots == min(n_slots, n_layers)
            weights.run_passes(streamer, n_passes=3)
            assert streamer.stats.passes == 3


def test_tensors_straddle_shards_and_are_partly_resident(tmp_path: Path) -> None:
    sizes = [[70_001, 3, 150_000, 5000, 0], [1, 2, 3, 0, 0], [90_000, 80_000, 70_000, 1, 1],
             [5000, 5000, 5000, 5000, 5000], [200_000, 1, 1, 1, 1]]  # fmt: skip
    weights = write_weights(
        tmp_path, sizes, n_files=3, resident=lambda i, j: (i + j) % 3 == 0 or i == 3
    )
    seen: list[tuple[int, int]] = []
    with WeightStreamer(
        weights.layers,
        2,
        read_bytes=16 * PAGE,
        poison=True,
        progress=lambda done, total: seen.append((done, total)),
    ) as streamer:
        weights.run_passes(streamer, n_passes=4)
        records = [r for layer in weights.layers for r in layer.resident_records]
        assert streamer.resident_bytes == resident_footprint(records)
        assert streamer.ring_bytes == 2 * max(
            buffer_bytes(layer.slot_bytes) for layer in weights.layers
        )
    assert seen[-1][0] == seen[-1][1] > sum(record.n_bytes for record in records) - 1
    assert seen == sorted(seen)


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
        monkeypatch.setattr(file_supply, "AlignedBuffer", None)  # a call would fail
        with streamer.layer(0) as tensors:
            view = tensors["layers.0.t0"]
            weights.check(0, tensors)
        assert set(bytes(view)) == {0xFF}
        gate.opened.set()
        weights.run_passes(streamer, 3)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(data=st.data())
def test_random_layouts(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    size = st.sampled_from([0, 1, 7, 4095, 4096, 4097, 65_536, 70_000]) | st.integers(0, 30_000)
    sizes = data.draw(st.lists(st.lists(size, max_size=4), min_size=1, max_size=7))
    chosen = data.draw(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 3))))
    weights = write_weights(
        tmp_path_factory.mktemp("w"),
        sizes,
        n_files=data.draw(st.integers(1, 3)),
        padding=data.draw(st.integers(0, 9000)),
        resident=lambda i, j: (i, j) in chosen,
    )
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    faulty = FaultyReads(
        lambda call, length: rng.choice([None, None, 4096, rng.randint(1, length)])
    )
    with WeightStreamer(
        weights.layers,
        data.draw(st.integers(1, 8)),
        read_bytes=PAGE * data.draw(st.sampled_from([1, 2, 7, 2048])),
        n_readers=data.draw(st.integers(1, 5)),
        storage=faulty.storage,
        poison=True,
    ) as streamer:
        weights.run_passes(streamer, 2, stop_before=data.draw(st.integers(0, len(sizes))))
        weights.run_passes(streamer, 2)


def test_everything_resident_needs_no_ring(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000, 0], [5000]], resident=lambda i, j: True)
    with WeightStreamer(weights.layers, 0) as streamer:
        assert not reader_threads()
        weights.run_passes(streamer, 3)
        assert streamer.stats == StreamStats(passes=3, stall_seconds=streamer.stats.stall_seconds)
        assert (streamer.n_slots, streamer.ring_bytes) == (0, 0)


def test_layers_without_bytes(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[], [0], [5000], []])
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.run_passes(streamer, 3)


def test_arguments_are_checked(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[9000]])
    with pytest.raises(ValueError, match="slot and a reader"):
        WeightStreamer(weights.layers, 0)
    with pytest.raises(ValueError, match="slot and a reader"):
        WeightStreamer(weights.layers, 1, n_readers=0)
    with pytest.raises(ValueError, match="multiple of 4096"):
        WeightStreamer(weights.layers, 1, read_bytes=1000)
    with WeightStreamer(weights.layers, 1) as streamer:
        for index in (-1, 1):
            with pytest.raises(IndexError), streamer.layer(index):
                pass


def test_metrics(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[PAGE * 4], [PAGE * 8]], padding=0)
    with WeightStreamer(weights.layers, 1, read_bytes=PAGE) as streamer:
        weights.run_passes(streamer, 2)
        before = streamer.stats
        assert before.passes == 2
        assert before.bytes_read >= 2 * PAGE * 12
        assert before.stall_seconds > 0
        assert before.read_seconds > 0
        weights.run_passes(streamer)
        span = streamer.stats - before
        assert span.passes == 1
        assert PAGE * 8 <= span.bytes_read <= PAGE * 16
