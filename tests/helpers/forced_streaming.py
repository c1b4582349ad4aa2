"""Plans that stream every layer of a model that would fit, for tests of what streaming does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from offload.placement.placement import LayerWeights, Placement
from offload.placement.plan import min_host_bytes, plan_placement


def force_streaming(patch: pytest.MonkeyPatch, n_slots: int = 2) -> None:
    """Make all further loads keep no layer in memory except a ring of `n_slots`."""

    def planned(layers: Sequence[LayerWeights], *_: Any, **__: Any) -> Placement:
        smallest = min_host_bytes(layers, n_slots)
        return plan_placement(layers, smallest, n_slots=n_slots)

    patch.setattr("specdec.planning.memory.placement_planner.plan_placement", planned)
