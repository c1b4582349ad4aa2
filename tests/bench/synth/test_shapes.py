"""Shapes of known models, and of a wished size."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from bench.synth.growth import GrowthPlanner
from bench.synth.shapes import (
    MIXTURES,
    SHAPES,
    Experts,
    LlamaShape,
    SynthError,
    choose_shape,
    shape_of_size,
)

A3B = replace(MIXTURES["qwen3-30b-a3b"], vocab_size=32_000)
SMALL_MIXTURE = LlamaShape(256, 0, 6, 2, 1, 128, 4096, tied=True, experts=Experts(64, 8, 64))


@dataclass(frozen=True)
class Bf16:
    block_size: int = 1

    def model_bytes(self, shape: LlamaShape) -> float:
        return shape.n_bytes(2)


@pytest.mark.parametrize("text", [1_000_000_000, 6_000_000_000, 13_000_000_000, 60_000_000_000])
@pytest.mark.parametrize("vocab_size", [None, 32_000])
def test_sizes_are_met_closely(text: int, vocab_size: int | None) -> None:
    shape = shape_of_size(text, vocab_size=vocab_size, min_layers=6, min_intermediate_size=1024)
    assert shape.n_bytes() == pytest.approx(text, rel=0.02)


def test_impossible_sizes_name_the_smallest_possible() -> None:
    with pytest.raises(SynthError, match="the smallest model of this width takes"):
        shape_of_size(10_000_000, min_layers=6, min_intermediate_size=1024)


def test_more_layers_than_any_model_has_are_refused() -> None:
    with pytest.raises(SynthError, match=r"layers, more than 1024: ask for less, or for a wider"):
        shape_of_size(10**18)


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


@pytest.mark.parametrize("n_layers", [6, 16, 30])
def test_a_size_cuts_the_layers_of_a_mixture_and_leaves_its_experts(n_layers: int) -> None:
    exact = replace(A3B, n_layers=n_layers)
    n_bytes = round(exact.n_bytes(2) * 1.01)
    known = MIXTURES["qwen3-30b-a3b"]
    assert choose_shape(SMALL_MIXTURE, known, n_bytes, A3B.vocab_size, Bf16()) == exact


def test_a_mixture_smaller_than_the_least_layers_is_refused() -> None:
    with pytest.raises(SynthError, match="6, as the small model has, take"):
        choose_shape(SMALL_MIXTURE, A3B, 1_000_000_000, None, Bf16())


def test_a_mixture_needs_a_shape_beside_a_size() -> None:
    with pytest.raises(SynthError, match="give --like"):
        choose_shape(SMALL_MIXTURE, None, 10**10, None, Bf16())
