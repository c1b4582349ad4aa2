"""Both ways of computing a layer's experts give the same, and what is copied is all that is hit."""

from __future__ import annotations

import torch

from bench.experts.grouped import Layer

HIDDEN, INNER, N_EXPERTS = 64, 32, 4


def test_the_copied_bytes_are_those_of_the_experts_hit() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        layer = Layer(HIDDEN, INNER, N_EXPERTS, N_EXPERTS)
        found = layer.figures(n_rows=3)
    assert found["n_experts"] == N_EXPERTS
    assert found["copied_bytes"] == N_EXPERTS * 3 * HIDDEN * INNER * 2
    assert min(found[f"{way}_seconds"] for way in ("one_by_one", "copy", "grouped")) > 0


def test_both_ways_compute_the_same() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        layer = Layer(HIDDEN, INNER, N_EXPERTS, 2)
        rows = torch.randn(5, HIDDEN).bfloat16()
        weights, chosen = torch.rand(5, N_EXPERTS).topk(2)
        one_by_one, grouped = layer.run(rows, chosen, weights.bfloat16())
    assert one_by_one.abs().max() > 0
    assert torch.allclose(one_by_one, grouped, atol=2e-2 * float(grouped.abs().max()))
