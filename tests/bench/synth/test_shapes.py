"""Shapes of known models."""

from __future__ import annotations

import pytest

from bench.synth.growth import GrowthPlanner
from bench.synth.shapes import SHAPES, LlamaShape


@pytest.mark.parametrize("name", SHAPES)
def test_known_shapes_can_hold_the_embedded_target(name: str) -> None:
    target = LlamaShape(384, 1024, 6, 3, 3, 128, 4096, tied=True)
    grown = SHAPES[name].with_head_dim(128)
    plans = GrowthPlanner(target, grown).tensors()
    assert sum(plan.n_weights for plan in plans) == grown.parameters


def test_known_shapes_have_the_published_number_of_parameters() -> None:
    assert SHAPES["llama-3.2-1b"].parameters == 1_235_814_400
    assert SHAPES["llama-3.2-3b"].parameters == 3_212_749_824
    assert SHAPES["llama-3-8b"].parameters == 8_030_261_248
    assert SHAPES["llama-2-7b"].parameters == 6_738_415_616
    assert SHAPES["llama-2-13b"].parameters == 13_015_864_320
