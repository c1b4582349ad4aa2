"""Layers pinned at their addresses, whose pages the system does not give back."""

from __future__ import annotations

import pytest
from mapped_weights import mapped
from streaming import uneven_sizes
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


def test_what_could_not_be_given_back_can_be_asked_for_again(weights, monkeypatch) -> None:
    def refused(*arguments: object) -> None:
        raise AddressSpaceError("no")

    with mapped(weights) as files, Pager(files.layers, [], files.mappings, 2) as pager:
        pager.set_num_pinned(2)
        files.run_passes(pager, 2)
        with monkeypatch.context() as patch:
            patch.setattr(memory, "move_pages", refused)
            with pytest.raises(AddressSpaceError):
                pager.set_num_pinned(0)
        pager.set_num_pinned(0)
        assert pager.num_pinned == 0
        files.run_passes(pager, 2)
