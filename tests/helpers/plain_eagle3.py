"""An EAGLE-3 head by the paper's equations (arXiv 2503.01840, section 3.1), in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle3_heads import EPS, HEAD_DIM, N_HEADS, N_KV_HEADS, THETA, TinyHead

if TYPE_CHECKING:
    import torch


class PlainHead:
    """A head on one sequence, without a cache: it computes all positions again at each call.

    embedding: the target's, [vocab, hidden].
    """

    def __init__(self, head: TinyHead, embedding: torch.Tensor) -> None:
        self.head = head
        self.embedding = head.tensors.get("embed_tokens.weight", embedding)

    def fused(self, states: torch.Tensor) -> torch.Tensor:
        """Return g [n, hidden] of the target's states [n, layers * hidden]."""
        import torch

        tensors = self.head.tensors
        if self.head.has("fc_norm"):
            parts = states.chunk(len(self.head.layer_inputs), dim=-1)
            normed = [_norm(x, tensors[f"fc_norm.{i}.weight"]) for i, x in enumerate(parts)]
            states = torch.cat(normed, dim=-1)
        if self.head.has("norm_before_fc"):
            states = _norm(states, tensors["input_norm.weight"])
        return states @ tensors["fc.weight"].T

    def run(self, token_ids: Sequence[int], g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return logits [n, vocab] and the states [n, hidden] to go on from; g: [n, hidden]."""
        import torch

        def tensor(name: str) -> torch.Tensor:
            return self.head.tensors[f"layers.0.{name}.weight"]

        tokens = _norm(self.embedding[list(token_ids)], tensor("input_layernorm"))
        normed = _norm(g, tensor("hidden_norm"))
        residual = normed if self.head.has("norm_before_residual") else g
        x = torch.cat([tokens, normed], dim=-1)
        query, key, value = (x @ tensor(f"self_attn.{name}_proj").T for name in "qkv")
        residual = residual + _attention(query, key, value) @ tensor("self_attn.o_proj").T
        y = _norm(residual, tensor("post_attention_layernorm"))
        gate = torch.nn.functional.silu(y @ tensor("mlp.gate_proj").T)
        states = residual + (gate * (y @ tensor("mlp.up_proj").T)) @ tensor("mlp.down_proj").T
        normed = _norm(states, self.head.tensors["norm.weight"])
        own = normed @ self.head.tensors["lm_head.weight"].T
        logits = own
        if self.head.target_ids is not None:
            logits = torch.full((len(own), self.head.vocab_size), -torch.inf)
            logits[:, self.head.target_ids] = own
        return logits, normed if self.head.has("norm_output") else states

    def chain(self, token_ids: Sequence[int], states: torch.Tensor, length: int) -> list[int]:
        """Return the greedy proposal after tokens [n] with the target's states [n, ...]."""
        import torch

        tokens, g = list(token_ids), self.fused(states)
        for _ in range(length):
            logits, own = self.run(tokens, g)
            tokens.append(int(logits[-1].argmax()))
            g = torch.cat([g, own[-1:]])
        return tokens[len(token_ids) :]


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return weight * x * (x.pow(2).mean(-1, keepdim=True) + EPS).rsqrt()


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention with rotary positions from 0 on."""
    import torch

    n = len(query)
    query, key = (_rotated(x.view(n, -1, HEAD_DIM)) for x in (query, key))
    groups = N_HEADS // N_KV_HEADS
    key = key.repeat_interleave(groups, dim=1)
    value = value.view(n, -1, HEAD_DIM).repeat_interleave(groups, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query, key) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    return torch.einsum("hij,jhd->ihd", scores.softmax(-1), value).reshape(n, -1)


def _rotated(x: torch.Tensor) -> torch.Tensor:
    import torch

    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = torch.arange(len(x))[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
