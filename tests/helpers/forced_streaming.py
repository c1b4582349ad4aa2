"""Plans that stream every layer of a model that would fit, for tests of what streaming does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from offload.residency.plan import LayerWeights, ResidencyPlan, plan_residency

_PLENTY_BYTES = 1 << 40


def force_streaming(patch: pytest.MonkeyPatch, n_slots: int = 2) -> None:
    """Loads from now on keep nothing of the layers in memory but a ring of `n_slots`."""

    def planned(layers: Sequence[LayerWeights], *_: Any, **__: Any) -> ResidencyPlan:
        smallest = plan_residency(layers, _PLENTY_BYTES, n_slots=n_slots).smallest_bytes
        return plan_residency(layers, smallest, n_slots=n_slots)

    patch.setattr("specdec.planning.placement.plan_residency", planned)
