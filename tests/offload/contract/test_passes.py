"""Passes over all layers: each comes whole and in order, within the budget of slots."""

from __future__ import annotations

from pathlib import Path

import pytest
from layer_suppliers import PAGE, SuppliedLayers
from paging import page_weights
from streaming import reader_threads, uneven_sizes
from weight_files import FaultyReads, write_weights

from offload.ring.cursor import StreamStats

Kind = type[SuppliedLayers]


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("n_slots", range(1, 8))
def test_every_layer_count_and_ring_depth(tmp_path: Path, kind: Kind, n_slots: int) -> None:
    for n_layers in range(1, 8):
        folder = tmp_path / str(n_layers)
        folder.mkdir()
        sizes = [[9000, *layer] for layer in uneven_sizes(n_layers, 17 * n_layers + n_slots)]
        with kind(write_weights(folder, sizes), n_slots, n_readers=3) as layers:
            assert layers.access.n_slots == min(n_slots, n_layers)
            layers.run_passes(3)
            assert layers.access.stats.passes == 3
            layers.check_budget()


def test_no_restart_is_made_where_none_is_needed(tmp_path: Path, kind: Kind) -> None:
    reads = FaultyReads()
    with kind(page_weights(tmp_path), 5, storage=reads.storage) as layers:
        layers.run_passes()
        layers.access.restart()
        layers.run_passes()
        assert reads.n_calls <= 3 * 19


def test_a_layer_left_open_is_released_by_a_restart(tmp_path: Path, kind: Kind) -> None:
    """As after an interrupt between two lines: the with-block ends in another pass."""
    with kind(page_weights(tmp_path), 2) as layers:
        left_open = layers.access.layer(0)
        left_open.__enter__()
        layers.access.restart()
        layers.run_passes()
        layers.enter(0)
        left_open.__exit__(None, None, None)
        layers.leave(0)
        layers.run_passes(2)


def test_everything_resident_needs_no_ring(tmp_path: Path, kind: Kind) -> None:
    weights = write_weights(tmp_path, [[9000, 0], [5000]], resident=lambda i, j: True)
    with kind(weights, 0) as layers:
        assert not [t for t in reader_threads() if t.name.startswith("specdec-reader")]
        layers.run_passes(3)
        stats = layers.access.stats
        assert stats == StreamStats(passes=3, stall_seconds=stats.stall_seconds)
        assert (layers.access.n_slots, layers.access.ring_bytes) == (0, 0)
        layers.check_budget()


def test_progress_adds_up(tmp_path: Path, kind: Kind) -> None:
    sizes = uneven_sizes(6, 3)
    weights = write_weights(tmp_path, sizes, n_files=3, resident=lambda i, j: (i + j) % 3 == 0)
    seen: list[tuple[int, int]] = []
    with kind(weights, 2, progress=lambda done, total: seen.append((done, total))) as layers:
        layers.run_passes()
    assert seen == sorted(seen)
    n_resident = sum(r.n_bytes for layer in weights.layers for r in layer.resident_records)
    assert seen[-1][0] == seen[-1][1] >= n_resident


def test_metrics(tmp_path: Path, kind: Kind) -> None:
    with kind(page_weights(tmp_path), 1) as layers:
        layers.run_passes(2)
        before = layers.access.stats
        assert before.passes == 2
        assert before.bytes_read >= 2 * 19 * PAGE
        assert before.stall_seconds > 0
        assert before.read_seconds > 0
        layers.run_passes()
        span = layers.access.stats - before
        assert span.passes == 1
        assert (19 - 7) * PAGE <= span.bytes_read <= 2 * 19 * PAGE


def test_arguments_are_checked_before_anything_is_touched(tmp_path: Path, kind: Kind) -> None:
    weights = page_weights(tmp_path)
    for n_slots, options in ((0, {}), (1, {"n_readers": 0})):
        with pytest.raises(ValueError, match="slot and a reader"):
            kind(weights, n_slots, **options)
    with pytest.raises(ValueError, match="multiple of 4096"):
        kind(weights, 1, read_bytes=1000)
    with kind(weights, 1) as layers:
        for index in (-1, 5):
            with pytest.raises(IndexError):
                layers.enter(index)
