"""Gated delta rules: Gated DeltaNet (Yang et al. 2025, eq. 10), Kimi Delta Attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backends.packed.kernels import has_numba
from backends.recurrent.kinds import Recurrence, Rows, State


@dataclass(frozen=True)
class DeltaRule(Recurrence):
    """A delta rule, computed token by token by the family's own function.

    rows: query, key [tokens, key heads, key dim], value [tokens, value heads, value dim], the
    logarithm of the decay, and beta [tokens, value heads].
    """

    n_products = 3

    step: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    """transformers' recurrent function."""
    normalises: bool
    """Whether it normalises queries and keys."""

    def initial(self, rows: Rows) -> State:
        _, key, value, *_ = rows
        shape = (1, value.shape[1], key.shape[2], value.shape[2])
        return torch.zeros(shape, dtype=torch.float32, device=key.device)

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        options: dict[str, Any] = {
            "output_final_state": True,
            "use_qk_l2norm_in_kernel": self.normalises,
        }
        outputs = []
        for i in range(len(rows[0])):
            query, key, value, decay, beta = (x[None, i : i + 1] for x in rows)
            output, state = self.step(
                query, key, value, g=decay, beta=beta, initial_state=state, **options
            )
            outputs.append(output[0])
        return state, torch.cat(outputs)


def delta_rule(step: Callable[..., Any], normalises: bool) -> Recurrence:
    """Return the compiled delta rule if numba is installed, else transformers' own."""
    if not has_numba():
        return DeltaRule(step, normalises)
    from backends.recurrent.delta_by_numba import CompiledDeltaRule

    return CompiledDeltaRule(normalises)
