"""Replacements for the attention code of single families (exact, on a CPU).

Each function is a method of its class in transformers, with scores, softmax and sums computed by
the mask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import softplus
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from backends.attention.blocks import BlockedMask
from backends.feedforward.elementwise import by_rows


def adapt(model: nn.Module) -> bool:
    """Make the attention modules of a model that are listed here compute with blocked masks.

    Returns whether there are any.
    """
    modules = [m for m in model.modules() if type(m).__name__ in _FUNCTIONS]
    for module in modules:
        method, blocked = _FUNCTIONS[type(module).__name__]
        setattr(module, method, _either(module, getattr(module, method), blocked))
    return bool(modules)


def _either(module: nn.Module, own: Callable[..., Any], blocked: Callable[..., Any]) -> Any:
    """Return a method that uses `blocked` for blocked masks, else the class's own."""

    def method(*args: Any, **kwargs: Any) -> Any:
        is_blocked = any(isinstance(x, BlockedMask) for x in (*args, *kwargs.values()))
        return blocked(module, *args, **kwargs) if is_blocked else own(*args, **kwargs)

    return method


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


def _falcon(
    self: Any,
    hidden_states: torch.Tensor,
    alibi: None = None,
    attention_mask: BlockedMask | None = None,
    position_ids: torch.Tensor | None = None,
    layer_past: Any = None,
    position_embeddings: tuple[torch.Tensor, torch.Tensor] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    assert attention_mask is not None
    assert position_embeddings is not None
    fused = self._split_heads(self.query_key_value(hidden_states))
    query, key, value = (x.transpose(1, 2) for x in fused)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = layer_past.update(key, value, self.layer_idx)
    output = attention_mask.attend(query, key, value, self.inv_norm_factor)
    return self.dense(output.flatten(2)), None


def _doge(
    self: Any,
    hidden_states: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    attention_mask: BlockedMask,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend to all keys, with a bias computed from their values: the context is no longer than
    what the dynamic mask keeps."""
    heads = (*hidden_states.shape[:-1], -1, self.head_dim)
    query = self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2)
    key = self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2)
    value = self.v_proj(hidden_states).view(heads).transpose(1, 2)
    query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    key, value = past_key_values.update(key, value, self.layer_idx)
    steps = by_rows(softplus)(self.dt_proj(value.transpose(1, 2).flatten(2)))
    bias = torch.exp(self.A * steps)[0].T.repeat_interleave(self.num_key_value_groups, dim=0)
    output = attention_mask.attend(query, key, value, self.scaling, bias=bias)
    return self.o_proj(output.flatten(2)), None


def _scaled_by(name: str) -> Callable[..., Any]:
    """Return the attention of a family that calls it with its mask: self._attn(q, k, v, mask)."""

    def attn(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: BlockedMask,
    ) -> tuple[torch.Tensor, None]:
        output = attention_mask.attend(query, key, value, 1 / float(getattr(self, name)))
        return output.transpose(1, 2), None

    return attn


_FUNCTIONS: dict[str, tuple[str, Callable[..., Any]]] = {
    "BloomAttention": ("forward", _bloom),
    "CodeGenAttention": ("_attn", _scaled_by("scale_attn")),
    "DogeAttention": ("forward", _doge),
    "FalconAttention": ("forward", _falcon),
    "GPTJAttention": ("_attn", _scaled_by("scale_attn")),
    "GPTNeoXJapaneseAttention": ("_attn", _scaled_by("norm_factor")),
    "XGLMAttention": ("forward", _xglm),
}
"""(method, what takes its place) by the class of a family's attention."""
