"""Layers pinned in memory after use: fewer reads, and memory that is given back."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from address_limit import no_more_address_space
from layer_suppliers import SuppliedLayers
from streaming import uneven_sizes
from system_probes import needs_address_limit
from weight_files import Weights, write_weights

from offload.ring.order import ReadOrder

Kind = type[SuppliedLayers]
N_LAYERS = 7


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Seven layers, one of which is wholly resident and one in part."""
    sizes = [[20_000, *layer] for layer in uneven_sizes(N_LAYERS, 5, limit=40_000)]
    return write_weights(tmp_path, sizes, resident=lambda i, j: i == 2 or (i == 4 and j > 0))


@pytest.mark.parametrize("num_pinned", [0, 1, 3])
def test_pinned_layers_are_not_read_again(weights: Weights, kind: Kind, num_pinned: int) -> None:
    with kind(weights, 2) as layers:
        access = layers.access
        layers.run_passes()
        assert access.set_num_pinned(num_pinned) == num_pinned
        layers.run_passes()
        assert access.num_pinned == num_pinned
        access.restart()
        n_passes, before = 5, access.stats.bytes_read
        layers.run_passes(n_passes)
        pinned = access._cursor.pinned
        sizes = [layers.streamed_bytes(i) for i in range(N_LAYERS) if i not in pinned]
        access.stop()
        n_read = access.stats.bytes_read - before
        # A little more: readers go ahead of the next pass.
        assert n_passes * sum(sizes) <= n_read + 2 * max(sizes)
        assert n_read <= n_passes * sum(sizes) + 2 * max(sizes)


def test_fewer_are_pinned_if_memory_is_short(weights: Weights, kind: Kind, monkeypatch) -> None:
    with kind(weights, 2) as layers:
        n_left = 1

        def scarce() -> object:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                raise MemoryError
            return make()

        make = layers.access._new_slot
        monkeypatch.setattr(layers.access, "_new_slot", scarce)
        layers.access.set_num_pinned(3)
        layers.run_passes(3)
        assert layers.access.num_pinned == 1


@needs_address_limit
def test_without_address_space_none_is_pinned(tmp_path: Path, kind: Kind) -> None:
    with kind(write_weights(tmp_path, [[3_000_000]] * 5), 2, read_bytes=1 << 20) as layers:
        layers.run_passes()
        layers.access.set_num_pinned(3)
        with no_more_address_space():
            for index in range(5):
                layers.access.enter(index)
                layers.access.leave(index)
        assert layers.access.num_pinned == 0
        layers.run_passes()


def test_the_memory_is_given_back(weights: Weights, kind: Kind, monkeypatch) -> None:
    made: list[object] = []
    with kind(weights, 2) as layers:
        access = layers.access
        make = access._new_slot
        monkeypatch.setattr(access, "_new_slot", lambda: made.append(make()) or made[-1])
        access.set_num_pinned(3)
        layers.run_passes(2)
        pinned = list(access._cursor.pinned.values())
        access.set_num_pinned(1)
        assert [layers.is_freed(memory) for memory in pinned] == [False, True, True]
        layers.run_passes(2)
        layers.check_budget()
        layers.close()
        assert all(map(layers.is_freed, [*pinned, *made]))


def test_an_error_in_a_layer_keeps_it(weights: Weights, kind: Kind) -> None:
    """The bytes are correct, whatever happened to the computation."""
    with kind(weights, 2) as layers:
        layers.access.set_num_pinned(3)
        for index in range(N_LAYERS):
            with pytest.raises(ZeroDivisionError), layers.layer(index):
                raise ZeroDivisionError
        layers.run_passes(2)
        assert layers.access.num_pinned == 3


def test_a_forgotten_layer_may_be_collected_by_a_reader(
    tmp_path: Path, kind: Kind, monkeypatch
) -> None:
    """The collector runs while a reader asks for the next layer: freeing must not take its lock."""
    with kind(write_weights(tmp_path, [[20_000]] * 5), 2) as layers:
        access = layers.access
        access.set_num_pinned(3)
        assert 2 in access._to_pin
        layers.run_passes(stop_before=1)
        forgotten: list[Any] = []
        is_collected = threading.Event()
        next_position = ReadOrder._next

        def collecting(order: ReadOrder, position: int) -> int:
            if forgotten:
                forgotten.clear()
                is_collected.set()
            return next_position(order, position)

        monkeypatch.setattr(ReadOrder, "_next", collecting)
        used, left_open = access.layer(1), access.layer(2)
        used.__enter__()
        left_open.__enter__()
        forgotten.append(left_open)
        del left_open
        used.__exit__(None, None, None)  # a reader asks for the next layer
        assert is_collected.wait(10)
        access.restart()
        layers.run_passes(2)
