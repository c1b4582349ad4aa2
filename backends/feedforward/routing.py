"""Batch-invariant routers and shared experts on a CPU.

A router computes products, softmax or sigmoid, and the top k: all by row except the sigmoid in
float32, which torch computes by another function at the end of a tensor (see elementwise). So
routers are called with rows that fill whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backends.feedforward.elementwise import in_whole_vectors
from backends.feedforward.linear import linear_of

GATE_OUTPUTS = 16
"""Outputs to compute for a shared expert's gate, of which the first is used: the kernels for a
single output are not batch-invariant."""


def batch_invariant_routing(model: nn.Module) -> None:
    """Make a mixture's routers and the gates of its shared experts batch-invariant."""
    for module in model.modules():
        if is_router(module):
            module.forward = _by_row(module.forward, module.weight.shape[0])
        elif hasattr(module, "shared_expert_gate"):
            module.forward = _with_shared_expert(module)


def is_router(module: nn.Module) -> bool:
    """Return whether a module multiplies rows by `weight` [experts, hidden] and takes the top k."""
    return type(module).__name__.lower().endswith("topkrouter")


def _by_row(forward: Callable[..., Any], n_experts: int) -> Callable[..., Any]:
    batch_invariant = in_whole_vectors(forward, n_experts)
    return lambda hidden: batch_invariant(hidden.reshape(-1, hidden.shape[-1]))


def _with_shared_expert(block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return Qwen2-MoE's forward of a block, with the sigmoid computed in whole vectors."""
    sigmoid = in_whole_vectors(torch.sigmoid, GATE_OUTPUTS)

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.view(-1, hidden.shape[-1])
        shared = block.shared_expert(rows)
        _, weights, experts = block.gate(rows)
        output = block.experts(rows, experts, weights)
        weight = block.shared_expert_gate.weight.repeat(GATE_OUTPUTS, 1)
        gate = linear_of(rows.dtype)(rows[None], weight, None)[0]
        output = output + sigmoid(gate)[:, :1] * shared
        return output.reshape(hidden.shape)

    return forward
