"""Experts fetched one by one: transformers' own sums, and rows independent of each other."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from backends.feedforward.elementwise import batch_invariant_functions, in_whole_vectors
from backends.feedforward.experts import ONE_BY_ONE, ExpertsRunner
from backends.hf.products import products_of_experts
from backends.hf.self_test import min_batch_tokens_of_product

HIDDEN, INNER, N_EXPERTS, N_USED = 48, 40, 6, 3


def make_experts(implementation: str = ONE_BY_ONE) -> Qwen3MoeExperts:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_experts=N_EXPERTS,
        experts_implementation=implementation,
    )
    generator = torch.Generator().manual_seed(0)
    module = Qwen3MoeExperts(config)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    batch_invariant_functions(module)
    return module.requires_grad_(False)


def fetch(
    module: nn.Module, backwards: bool, experts: Sequence[int], check: object
) -> Generator[tuple[int, list[torch.Tensor]], None, None]:
    for expert in sorted(experts, reverse=backwards):
        gate, up = module.gate_up_proj[expert].chunk(2)
        yield expert, [gate, up, module.down_proj[expert]]


def min_batch_tokens(module: nn.Module) -> int:
    """Minimum batch on this machine: MKL's sums change with fewer than 4 rows, or 12."""
    actual = [
        min_batch_tokens_of_product(expert, torch.float32) for expert in products_of_experts(module)
    ]
    assert None not in actual, "no number of rows is batch-invariant here"
    return max(item for item in actual if item is not None)


def routed(num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(num_rows, HIDDEN, generator=generator)
    chosen = torch.rand(num_rows, N_EXPERTS, generator=generator).topk(N_USED)
    return hidden, chosen.indices, chosen.values


def test_the_sum_is_transformers_own() -> None:
    module, rows = make_experts(), routed(20)
    runner = ExpertsRunner(module, partial(fetch, module, False), 4)
    for implementation in ("eager", "grouped_mm"):
        expected = make_experts(implementation)(*rows)
        assert torch.allclose(module(*rows), expected, atol=1e-5)
    runner.detach()
    with pytest.raises(AttributeError, match="experts_runner"):
        module(*rows)


def test_neither_other_rows_nor_the_order_of_arrival_change_a_row() -> None:
    module, (hidden, experts, weights) = make_experts(), routed(60)
    min_count = min_batch_tokens(module)
    runner = ExpertsRunner(module, partial(fetch, module, False), min_count)
    together = runner(hidden, experts, weights)
    other = ExpertsRunner(module, partial(fetch, module, True), min_count)
    for start, end in ((0, 1), (7, 9), (20, 33), (59, 60)):
        part = slice(start, end)
        assert torch.equal(other(hidden[part], experts[part], weights[part]), together[part])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.skipif(not hasattr(nn.functional, "grouped_mm"), reason="an older torch")
def test_a_grouped_product_on_a_cpu_is_one_product_after_the_other(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    rows = torch.randn(40, HIDDEN, generator=generator).to(dtype)
    weights = torch.randn(4, 2 * INNER, HIDDEN, generator=generator).to(dtype)
    ends = [1, 4, 20, 40]
    grouped = nn.functional.grouped_mm(
        rows, weights.transpose(-2, -1), offs=torch.tensor(ends, dtype=torch.int32)
    )
    for weight, start, end in zip(weights, [0, *ends], ends, strict=False):
        assert torch.equal(grouped[start:end], linear(rows[start:end], weight))


@pytest.mark.parametrize("width", [1, 6, 16, 160, 700])
def test_a_sigmoid_in_whole_vectors_is_the_same_in_any_place(width: int) -> None:
    rows = 4 * torch.randn(300, width, generator=torch.Generator().manual_seed(3))
    batch_invariant = in_whole_vectors(torch.sigmoid, width)
    whole = batch_invariant(rows)
    assert torch.allclose(whole, torch.sigmoid(rows))
    for start, end in ((0, 1), (5, 8), (100, 233), (299, 300)):
        assert torch.equal(batch_invariant(rows[start:end]), whole[start:end])
