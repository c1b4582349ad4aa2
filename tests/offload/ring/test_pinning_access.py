"""Layers pinned in memory after use: correct bytes, fewer reads, and unpinning."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from address_limit import no_more_address_space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from streaming import pinning_operations, uneven_sizes
from system_probes import needs_address_limit
from weight_files import Weights, write_weights

from offload.ring.order import ReadOrder
from offload.ring.streamer import WeightStreamer
from offload.storage.aligned import ALIGNMENT

PAGE = ALIGNMENT
N_LAYERS = 7
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    """Seven layers, one of which is wholly resident and one in part."""
    folder = tmp_path_factory.mktemp("weights")
    sizes = [[*layer, 9000] for layer in uneven_sizes(N_LAYERS, 5, limit=60_000)]
    last = max(map(len, sizes)) - 1
    return write_weights(folder, sizes, resident=lambda i, j: i == 2 or (i == 4 and j == last))


@given(operations=pinning_operations(N_LAYERS, 25), n_slots=st.integers(1, 5))
@settings(
    max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_every_layer_has_its_bytes_whatever_is_pinned(weights, operations, n_slots) -> None:
    n_streamed = sum(1 for layer in weights.layers if layer.streamed)
    with WeightStreamer(weights.layers, n_slots, read_bytes=PAGE, poison=True) as streamer:
        num_to_pin = 0
        for what, number in operations:
            if what == "run_passes":
                weights.run_passes(streamer, 1, stop_before=number)
            elif what == "pin_layers":
                num_to_pin = streamer.pin_layers(number)
                assert num_to_pin == min(number, max(0, n_streamed - n_slots))
            else:
                streamer.restart()
            assert streamer.num_pinned <= num_to_pin
        weights.run_passes(streamer, 2)
        assert streamer.num_pinned == num_to_pin


@pytest.mark.parametrize("num_pinned", [0, 1, 3])
def test_pinned_layers_are_not_read_again(weights, num_pinned) -> None:
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE) as streamer:
        weights.run_passes(streamer)
        assert streamer.pin_layers(num_pinned) == num_pinned
        weights.run_passes(streamer)
        assert streamer.num_pinned == num_pinned
        pinned = list(streamer._cursor.pinned)
        streamer.restart()
        n_passes, before = 5, streamer.stats.bytes_read
        weights.run_passes(streamer, n_passes)
        streamer.close()
        n_read = streamer.stats.bytes_read - before
        layers = [item.slot_bytes for i, item in enumerate(weights.layers) if i not in pinned]
        # A little more: readers go ahead of the next pass.
        assert n_passes * sum(layers) <= n_read + 2 * max(layers)
        assert n_read <= n_passes * sum(layers) + 2 * max(layers)


def test_layers_are_pinned_at_even_distances() -> None:
    order = ReadOrder(12, 2)
    assert order.chosen(3) == {2, 6, 10}
    assert len(order.chosen(99)) == order.max_pinned == 10


def test_the_slots_have_something_to_do(weights) -> None:
    """As many layers stream as there are slots: none is read twice at a time."""
    with WeightStreamer(weights.layers, 5, read_bytes=PAGE) as streamer:
        assert streamer.pin_layers(99) == 1
        weights.run_passes(streamer, 3)
    with WeightStreamer(weights.layers, 9) as streamer:
        assert streamer.pin_layers(99) == 0
        weights.run_passes(streamer, 2)


def test_fewer_are_pinned_if_memory_is_short(weights, monkeypatch) -> None:
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE, poison=True) as streamer:
        n_left = 1

        def scarce() -> object:
            nonlocal n_left
            n_left -= 1
            if n_left < 0:
                raise MemoryError
            return make()

        make = streamer._new_slot
        monkeypatch.setattr(streamer, "_new_slot", scarce)
        streamer.pin_layers(3)
        weights.run_passes(streamer, 3)
        assert streamer.num_pinned == 1


@needs_address_limit
def test_without_address_space_none_is_pinned(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[3_000_000]] * 5)
    with WeightStreamer(weights.layers, 2) as streamer:
        weights.run_passes(streamer)
        streamer.pin_layers(3)
        with no_more_address_space():
            for index in range(5):
                streamer.enter(index)
                streamer.leave(index)
        assert streamer.num_pinned == 0
        weights.run_passes(streamer)


def test_a_forgotten_layer_may_be_collected_by_a_reader(tmp_path: Path, monkeypatch) -> None:
    """The collector runs while a reader asks for the next layer: freeing must not take its lock."""
    weights = write_weights(tmp_path, [[9000]] * 5)
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE) as streamer:
        streamer.pin_layers(3)
        assert 2 in streamer._to_pin
        weights.run_passes(streamer, stop_before=1)
        forgotten: list[Any] = []
        is_collected = threading.Event()
        next_position = ReadOrder._next

        def collecting(order: ReadOrder, position: int) -> int:
            if forgotten:
                forgotten.clear()
                is_collected.set()
            return next_position(order, position)

        monkeypatch.setattr(ReadOrder, "_next", collecting)
        used, left_open = streamer.layer(1), streamer.layer(2)
        used.__enter__()
        left_open.__enter__()
        forgotten.append(left_open)
        del left_open
        used.__exit__(None, None, None)  # a reader asks for the next layer
        assert is_collected.wait(10)
        streamer.restart()
        weights.run_passes(streamer, 2)


def test_the_memory_is_given_back(weights: Weights, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE) as streamer:
        make = streamer._new_slot
        monkeypatch.setattr(streamer, "_new_slot", lambda: made.append(make()) or made[-1])
        streamer.pin_layers(3)
        weights.run_passes(streamer, 2)
        pinned = list(streamer._cursor.pinned.values())
        streamer.pin_layers(1)
        assert [is_closed(memory) for memory in pinned] == [False, True, True]
        weights.run_passes(streamer, 2)
    assert all(map(is_closed, [*pinned, *made]))


def is_closed(memory: object) -> bool:
    return memory._map is None or memory._map.closed  # type: ignore[attr-defined]


def test_an_error_in_a_layer_keeps_it(weights: Weights) -> None:
    """The bytes are correct, whatever happened to the computation."""
    with WeightStreamer(weights.layers, 2, read_bytes=PAGE, poison=True) as streamer:
        streamer.pin_layers(3)
        for index in range(N_LAYERS):
            with pytest.raises(ZeroDivisionError), streamer.layer(index):
                raise ZeroDivisionError
        weights.run_passes(streamer, 2)
        assert streamer.num_pinned == 3


def test_a_file_that_was_replaced_is_noticed_all_the_same(tmp_path: Path) -> None:
    from offload.storage.direct_io import StorageError

    weights = write_weights(tmp_path, [[9000]] * 5)
    with WeightStreamer(weights.layers, 2) as streamer:
        streamer.pin_layers(3)
        weights.run_passes(streamer, 2)
        path = weights.layers[0].tensors[0].path
        path.write_bytes(path.read_bytes()[::-1])
        with pytest.raises(StorageError, match="changed"):
            weights.run_passes(streamer, 1)
