"""Routers and shared experts that give a row the same bits wherever it lies, on a CPU.

A router's scores are products, softmax or sigmoid, and the choice of the largest: all by row but
for the sigmoid in float32, which torch computes by another function at the end of a tensor (see
elementwise). So routers are called for rows that fill whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backends.feedforward.elementwise import in_whole_vectors
from backends.feedforward.linear import linear_of

GATE_OUTPUTS = 16
"""A product with one output has kernels of its own, whose rows depend on each other: the one number
of a shared expert's gate is computed as the first of so many."""


def batch_invariant_routing(model: nn.Module) -> None:
    """Let a mixture's routers, and the gates of its shared experts, compute rows alike."""
    for module in model.modules():
        if is_router(module):
            module.forward = _by_row(module.forward, module.weight.shape[0])
        elif hasattr(module, "shared_expert_gate"):
            module.forward = _with_shared_expert(module)


def is_router(module: nn.Module) -> bool:
    """A module that multiplies rows [n, hidden] with a `weight` [experts, hidden], and chooses."""
    return type(module).__name__.lower().endswith("topkrouter")


def _by_row(forward: Callable[..., Any], n_experts: int) -> Callable[..., Any]:
    batch_invariant = in_whole_vectors(forward, n_experts)
    return lambda hidden: batch_invariant(hidden.reshape(-1, hidden.shape[-1]))


def _with_shared_expert(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Qwen2-MoE's block: the forward of its class, the sigmoid left to whole vectors."""
    sigmoid = in_whole_vectors(torch.sigmoid, GATE_OUTPUTS)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        shared = block.shared_expert(rows)
        _, weights, experts = block.gate(rows)
        result = block.experts(rows, experts, weights)
        weight = block.shared_expert_gate.weight.repeat(GATE_OUTPUTS, 1)
        gate = linear_of(rows.dtype)(rows[None], weight, None)[0]
        result = result + sigmoid(gate)[:, :1] * shared
        return result.reshape(hidden.shape)

    return forward
