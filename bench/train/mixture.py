"""Small mixture of experts that behaves like the embedded target: its model and its losses.

The target's feed-forward layers are cut into experts of a few neurons each, grouped by similar gate
directions, and the router's rows begin as the mean direction of each group. So a mixture that uses
all of its experts is the target itself, and training only has to teach the router which of them a
token can do without.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

N_EXPERTS = 64
TOP_K = 4
_ROUTER_SCALE = 0.25
"""Norm of the router's initial rows: the experts of a token then have about equal weights, as the
target's neurons do. At 4 (with 8 experts per token) one of them got half the weight, and the loss
began 1.2 nats higher."""


def mixture_config(target: LlamaForCausalLM) -> Qwen3MoeConfig:
    """Return the config of a Qwen3-MoE of the target's sizes, 25 MB in bf16."""
    config = target.config
    return Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        intermediate_size=config.intermediate_size,
        moe_intermediate_size=config.intermediate_size // N_EXPERTS,
        num_experts=N_EXPERTS,
        num_experts_per_tok=TOP_K,
        norm_topk_prob=True,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters=dict(config.rope_parameters),
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=None,
    )


@torch.no_grad()
def build_mixture(target: LlamaForCausalLM, seed: int) -> Qwen3MoeForCausalLM:
    """Return the mixture before its training, in float32."""
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(mixture_config(target)).float()
    model.model.embed_tokens.weight.copy_(target.model.embed_tokens.weight)
    model.model.norm.weight.copy_(target.model.norm.weight)
    for ours, theirs in zip(model.model.layers, target.model.layers, strict=True):
        for name in ("input_layernorm", "post_attention_layernorm"):
            getattr(ours, name).weight.copy_(getattr(theirs, name).weight)
        # Qwen3 normalises queries and keys as well: those weights stay as they are, ones.
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            getattr(ours.self_attn, name).weight.copy_(getattr(theirs.self_attn, name).weight)
        _cut_into_experts(ours.mlp, theirs.mlp)
        ours.mlp.experts.forward = MethodType(_all_experts, ours.mlp.experts)
    return model


def _all_experts(
    experts: nn.Module, rows: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute all experts of rows [n, hidden] and weigh those that were not chosen with zero.

    An expert has 16 neurons: one product over all of them is quicker than many small ones.

    chosen, weights: experts of each row and their weights, [n, TOP_K].
    """
    gate, up = experts.gate_up_proj.chunk(2, dim=1)  # each [experts, neurons, hidden]
    neurons = F.silu(rows @ gate.flatten(0, 1).T) * (rows @ up.flatten(0, 1).T)
    shares = torch.zeros(len(rows), N_EXPERTS, dtype=weights.dtype, device=rows.device)
    shares = shares.scatter(1, chosen, weights).to(neurons.dtype)
    weighted = neurons.unflatten(1, (N_EXPERTS, -1)) * shares[:, :, None]
    return weighted.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)


def _cut_into_experts(ours: nn.Module, theirs: nn.Module) -> None:
    gate, up, down = (getattr(theirs, f"{name}_proj").weight for name in ("gate", "up", "down"))
    directions = F.normalize(gate, dim=1)
    groups = similar_groups(directions, N_EXPERTS)
    for expert, neurons in enumerate(groups):
        ours.experts.gate_up_proj[expert].copy_(torch.cat([gate[neurons], up[neurons]]))
        # Routing weights sum to one: every selected expert has 1 / TOP_K at the start.
        ours.experts.down_proj[expert].copy_(down[:, neurons] * TOP_K)
        ours.gate.weight[expert] = directions[neurons].mean(0)
    ours.gate.weight.copy_(F.normalize(ours.gate.weight, dim=1) * _ROUTER_SCALE)


def similar_groups(directions: torch.Tensor, n_groups: int) -> list[torch.Tensor]:
    """Split rows [n, d] of norm 1 into groups of equal size: each takes the rows nearest to the
    first remaining one."""
    size = len(directions) // n_groups
    left = torch.arange(len(directions))
    groups = []
    for _ in range(n_groups):
        nearest = (directions[left] @ directions[left[0]]).topk(size).indices
        groups.append(left[nearest])
        keep = torch.ones(len(left), dtype=torch.bool)
        keep[nearest] = False
        left = left[keep]
    return groups


@contextmanager
def router_logits(model: Qwen3MoeForCausalLM) -> Iterator[list[torch.Tensor]]:
    """Yield a list that collects each layer's router logits [n, experts] inside the with-block."""
    logits: list[torch.Tensor] = []

    def note(module: nn.Module, args: object, output: tuple[torch.Tensor, ...]) -> None:
        logits.append(output[0])

    handles = [layer.mlp.gate.register_forward_hook(note) for layer in model.model.layers]
    try:
        yield logits
    finally:
        for handle in handles:
            handle.remove()


def balance_loss(logits: list[torch.Tensor]) -> torch.Tensor:
    """Return Switch Transformers' loss (Fedus et al. 2021, equation 4): TOP_K if balanced."""
    loss = load_balancing_loss_func(tuple(logits), N_EXPERTS, TOP_K)
    assert isinstance(loss, torch.Tensor)
    return loss
