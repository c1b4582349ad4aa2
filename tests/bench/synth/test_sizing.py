"""Shapes for a requested size."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from bench.synth.layouts import LAYOUTS
from bench.synth.recipes import RECIPES
from bench.synth.shapes import MIXTURES, SHAPES, Experts, LlamaShape, Storage, SynthError
from bench.synth.sizing import choose_shape
from offload.units import parse_bytes

A3B = replace(MIXTURES["qwen3-30b-a3b"], vocab_size=32_000)
SMALL = LlamaShape(384, 1024, 6, 3, 3, 128, 4096, tied=True)
SMALL_MIXTURE = LlamaShape(256, 0, 6, 2, 1, 128, 4096, tied=True, experts=Experts(64, 8, 64))


@dataclass(frozen=True)
class Bf16:
    block_size: int = 1

    def model_bytes(self, shape: LlamaShape) -> int:
        return shape.n_bytes(2)


@pytest.mark.parametrize("n_bytes", [1_000_000_000, 6_000_000_000, 13_000_000_000, 60_000_000_000])
@pytest.mark.parametrize("vocab_size", [None, 32_000])
def test_sizes_are_met_closely(n_bytes: int, vocab_size: int | None) -> None:
    shape = choose_shape(SMALL, None, n_bytes, vocab_size, Bf16())
    assert shape.n_bytes() == pytest.approx(n_bytes, rel=0.02)


STORAGES = {"bf16": LAYOUTS["bf16"], "int4": LAYOUTS["int4"], "q4_k_m": RECIPES["q4_k_m"]}


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("storage", STORAGES.values(), ids=list(STORAGES))
@pytest.mark.parametrize("like", [None, "llama-3-8b", "llama-2-7b"])
@pytest.mark.parametrize("vocab_size", [None, 4096])
@pytest.mark.parametrize("width", [1024, 1100])
def test_a_size_that_is_refused_names_one_that_works(
    storage: Storage, like: str | None, vocab_size: int | None, width: int
) -> None:
    source, base = replace(SMALL, intermediate_size=width), SHAPES[like] if like else None
    with pytest.raises(SynthError, match=r"^cannot reach 9.54 MiB with .*MiB or more") as refused:
        choose_shape(source, base, 10_000_000, vocab_size, storage)
    assert ("--vocab-size" in str(refused.value)) == (vocab_size is None)
    (named,) = re.findall(r"--size (\S+)", str(refused.value))
    shape = choose_shape(source, base, parse_bytes(named), vocab_size, storage)
    assert storage.model_bytes(shape) == pytest.approx(parse_bytes(named), rel=0.02)
    assert (shape.n_layers, shape.intermediate_size >= width) == (6, True)


def test_a_size_is_not_met_by_another() -> None:
    """The embedding alone exceeds these 476 MiB; the smallest model is a sixth larger."""
    with pytest.raises(SynthError, match="cannot reach 476.84 MiB"):
        choose_shape(SMALL, None, 500_000_000, None, LAYOUTS["int4"])


def test_a_size_of_nothing_is_refused() -> None:
    with pytest.raises(SynthError, match="cannot reach 0 B"):
        choose_shape(SMALL, None, 0, None, Bf16())
    with pytest.raises(SynthError, match="cannot reach 0 B"):
        choose_shape(SMALL_MIXTURE, A3B, 0, None, Bf16())


def test_more_layers_than_any_model_has_are_refused() -> None:
    with pytest.raises(SynthError, match=r"layers, more than 1024: ask for less, or for a wider"):
        choose_shape(SMALL, None, 10**18, None, Bf16())


@pytest.mark.parametrize("n_layers", [6, 16, 30])
def test_a_size_cuts_the_layers_of_a_mixture_and_leaves_its_experts(n_layers: int) -> None:
    exact = replace(A3B, n_layers=n_layers)
    n_bytes = round(exact.n_bytes(2) * 1.01)
    known = MIXTURES["qwen3-30b-a3b"]
    assert choose_shape(SMALL_MIXTURE, known, n_bytes, A3B.vocab_size, Bf16()) == exact


def test_a_mixture_smaller_than_the_least_layers_is_refused() -> None:
    refused = r"whole layers, from .* \(6 layers, as the small model has\) to .* \(1024 layers\)"
    with pytest.raises(SynthError, match=refused):
        choose_shape(SMALL_MIXTURE, A3B, 1_000_000_000, None, Bf16())


def test_a_mixture_needs_a_shape_beside_a_size() -> None:
    with pytest.raises(SynthError, match="give --like"):
        choose_shape(SMALL_MIXTURE, None, 10**10, None, Bf16())
