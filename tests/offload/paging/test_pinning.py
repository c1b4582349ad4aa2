"""Layers pinned at their addresses after use: correct bytes, and no excess pages."""

from __future__ import annotations

from pathlib import Path

import pytest
from address_limit import no_more_address_space
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mapped_weights import mapped
from mapped_weights import memory_in as bytes_in
from paging import PAGE, slot_ranges
from streaming import pinning_operations, uneven_sizes
from system_probes import needs_address_limit
from weight_files import Weights, write_weights

from offload.paging import memory
from offload.paging.address_space import AddressSpaceError
from offload.paging.pager import Pager

N_LAYERS = 6
pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Weights:
    sizes = uneven_sizes(N_LAYERS, 7, limit=60_000)
    return write_weights(
        tmp_path_factory.mktemp("weights"), sizes, resident=lambda i, j: i == 3 and j == 0
    )


@given(operations=pinning_operations(N_LAYERS, 15), n_slots=st.integers(1, 3))
@settings(
    max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
def test_every_layer_has_its_bytes_whatever_is_pinned(weights, operations, n_slots) -> None:
    with (
        mapped(weights) as files,
        Pager(files.layers, [], files.mappings, n_slots, read_bytes=PAGE, poison=True) as pager,
    ):
        num_to_pin = 0
        for what, number in operations:
            if what == "run_passes":
                files.run_passes(pager, 1, stop_before=number)
            elif what == "pin_layers":
                num_to_pin = pager.pin_layers(number)
            else:
                pager.restart()
            assert pager.num_pinned <= num_to_pin
            for index in range(N_LAYERS):
                if index not in pager._cursor.pinned and not pager._acquired:
                    files.check_absent(index)
        files.run_passes(pager, 2)
        assert pager.num_pinned == num_to_pin
        for index in pager._cursor.pinned:
            files.check(index)


def test_pinned_layers_take_a_slot_each(weights: Weights) -> None:
    """The number of pages stays the same, at the layers' addresses or in the ring."""
    with mapped(weights) as files, Pager(files.layers, [], files.mappings, 2) as pager:
        files.run_passes(pager, 2)
        pager.pin_layers(2)
        files.run_passes(pager, 2)
        pinned = [(m.address, len(m.view)) for m in pager._cursor.pinned.values()]

        def n_bytes() -> int:
            return bytes_in([*slot_ranges(pager), *pinned, *files.ranges.values()])

        slot_bytes = pager.ring_bytes // 2
        assert n_bytes() <= pager.resident_bytes + 4 * slot_bytes
        pager.pin_layers(0)
        files.run_passes(pager, 2)
        assert n_bytes() <= pager.resident_bytes + 2 * slot_bytes


@needs_address_limit
def test_without_address_space_none_is_pinned(tmp_path: Path) -> None:
    weights = write_weights(tmp_path, [[3_000_000]] * 5)
    with mapped(weights) as files, Pager(files.layers, [], files.mappings, 2) as pager:
        files.run_passes(pager)
        pager.pin_layers(3)
        with no_more_address_space():
            for index in range(5):
                pager.enter(index)
                pager.leave(index)
        assert pager.num_pinned == 0
        files.run_passes(pager)


def test_what_could_not_be_given_back_can_be_asked_for_again(weights, monkeypatch) -> None:
    def refused(*arguments: object) -> None:
        raise AddressSpaceError("no")

    with mapped(weights) as files, Pager(files.layers, [], files.mappings, 2) as pager:
        pager.pin_layers(2)
        files.run_passes(pager, 2)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "move_pages", refused)
            with pytest.raises(AddressSpaceError):
                pager.pin_layers(0)
        pager.pin_layers(0)
        assert pager.num_pinned == 0
        files.run_passes(pager, 2)
