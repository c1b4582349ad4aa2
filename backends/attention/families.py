"""Replacements for the attention code of single families (exact, on a CPU).

Each function is the `forward` of its class in transformers, with scores, softmax and sums
computed by the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backends.attention.blocks import BlockedMask


def adapt(model: nn.Module) -> bool:
    """Make the attention modules of a model that are listed here compute with blocked masks.

    Returns whether there are any.
    """
    modules = [m for m in model.modules() if type(m).__name__ in _FORWARDS]
    for module in modules:
        module.forward = _either(module, _FORWARDS[type(module).__name__])
    return bool(modules)


def _either(module: nn.Module, blocked: Callable[..., Any]) -> Callable[..., Any]:
    """Return a forward that uses `blocked` for blocked masks, else the class's own forward."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        is_blocked = any(isinstance(x, BlockedMask) for x in (*args, *kwargs.values()))
        return blocked(module, *args, **kwargs) if is_blocked else own(*args, **kwargs)

    return forward


def _bloom(
    self: Any,
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    alibi: torch.Tensor,
    attention_mask: BlockedMask,
    layer_past: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    query, key, value = self._reshape(self.query_key_value(hidden_states))
    key, value = layer_past.update(key, value, self.layer_idx)
    scale, bias = self.inv_norm_factor, alibi[:, 0]
    output = attention_mask.attend(query, key, value, scale, bias=bias)
    return self.dense(output.flatten(2)) + residual, None


def _xglm(
    self: Any,
    hidden_states: torch.Tensor,
    key_value_states: None = None,
    past_key_values: Any = None,
    attention_mask: BlockedMask | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    def heads(states: torch.Tensor) -> torch.Tensor:
        return states.unflatten(2, (-1, self.head_dim)).transpose(1, 2)

    assert attention_mask is not None
    query = heads(self.q_proj(hidden_states) * self.scaling)
    key, value = heads(self.k_proj(hidden_states)), heads(self.v_proj(hidden_states))
    key, value = past_key_values.update(key, value, self.layer_idx)
    output = attention_mask.attend(query, key, value, scale=1.0)
    return self.out_proj(output.flatten(2)), None


_FORWARDS: dict[str, Callable[..., Any]] = {"BloomAttention": _bloom, "XGLMAttention": _xglm}
