"""Llama 4's mixture by the interface of transformers' other mixtures.

transformers computes every expert for every token and scales its inputs, by 0 for experts that are
not chosen. Here a token's experts alone are computed, from the same inputs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from backends.feedforward.elementwise import by_rows

_STANDARD = {"is_transposed": True, "is_concatenated": True, "has_gate": True, "has_bias": False}
"""Properties of a standard module of experts."""


def use_standard_experts(model: nn.Module) -> None:
    """Give Llama 4's experts the interface of standard ones."""
    for module in model.modules():
        if type(module).__name__ == "Llama4TextExperts":
            for name, value in _STANDARD.items():
                setattr(module, name, value)
            module._apply_gate = partial(_gate, module)
        elif type(module).__name__ == "Llama4TextMoe":
            module.forward = partial(_forward, module)


def _gate(experts: Any, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return up * experts.act_fn(gate)


def _forward(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = hidden_states.reshape(-1, self.hidden_dim)
    logits = nn.functional.linear(rows, self.router.weight)
    largest, experts = logits.topk(self.top_k, dim=1)
    scores = by_rows(torch.sigmoid)(largest.float()).to(rows.dtype)
    total = self.shared_expert(rows)
    for i in range(self.top_k):
        own = experts[:, i : i + 1]
        inputs = rows * scores[:, i : i + 1]
        total = total + self.experts.experts_runner(inputs, own, torch.ones_like(own))
    return total, logits
