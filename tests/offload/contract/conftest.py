"""Each kind of supplier of layers, for the tests of what they have in common."""

from __future__ import annotations

import pytest
from layer_suppliers import PagedLayers, RingLayers, SuppliedLayers


@pytest.fixture(params=[RingLayers, PagedLayers], ids=["ring", "pager"])
def kind(
    request: pytest.FixtureRequest, no_thread_is_left: None, small_huge_pages: None
) -> type[SuppliedLayers]:
    return request.param
