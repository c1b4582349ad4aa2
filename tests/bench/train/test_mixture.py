"""The embedded mixture before training: the target split into experts, and its losses."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeForCausalLM

from bench.train.mixture import (
    N_EXPERTS,
    TOP_K,
    balance_loss,
    build_mixture,
    router_logits,
    similar_groups,
)
from bench.train.moe import mixture_loss


@pytest.fixture
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=4 * N_EXPERTS,  # grouped products need rows of whole 16 bytes
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_groups_are_a_partition_into_equal_parts() -> None:
    directions = torch.nn.functional.normalize(torch.randn(96, 8), dim=1)
    groups = similar_groups(directions, 12)
    assert {len(group) for group in groups} == {8}
    assert sorted(torch.cat(groups).tolist()) == list(range(96))


def test_all_experts_together_are_the_targets_neurons(target) -> None:
    model = build_mixture(target, seed=1)
    experts, dense = model.model.layers[0].mlp.experts, target.model.layers[0].mlp
    rows = torch.randn(5, 32)
    all_of_them = torch.arange(N_EXPERTS).expand(5, -1)
    weights = torch.full((5, N_EXPERTS), 1 / TOP_K)
    with torch.no_grad():
        assert torch.allclose(experts(rows, all_of_them, weights), dense(rows), atol=1e-5)


def test_training_computes_what_transformers_does(target, tmp_path) -> None:
    model = build_mixture(target, seed=1)
    model.save_pretrained(tmp_path)
    loaded = Qwen3MoeForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    ids = torch.randint(0, 64, (2, 9))
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=1e-5)


def test_attention_begins_as_the_targets(target) -> None:
    model = build_mixture(target, seed=1)
    for ours, theirs in zip(model.model.layers, target.model.layers, strict=True):
        expected = theirs.self_attn.state_dict()
        actual = ours.self_attn.state_dict()
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_tokens_experts_begin_with_about_the_same_weight(target) -> None:
    model = build_mixture(target, seed=1)
    rows = torch.nn.functional.rms_norm(torch.randn(50, 32), (32,))
    with torch.no_grad():
        _, weights, _ = model.model.layers[0].mlp.gate(rows)
    assert weights.max() < 2 / TOP_K


def test_losses_reach_routers_and_experts(target) -> None:
    model = build_mixture(target, seed=1)
    ids = torch.randint(0, 64, (2, 9))
    mixture_loss(target, model, ids).backward()
    mlp = model.model.layers[0].mlp
    for parameter in (mlp.gate.weight, mlp.experts.gate_up_proj, mlp.experts.down_proj):
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0


def test_experts_that_are_used_alike_cost_least(target) -> None:
    model = build_mixture(target, seed=1)
    with router_logits(model) as actual, torch.no_grad():
        model(torch.randint(0, 64, (2, 9)))
    assert [tuple(logits.shape) for logits in actual] == [(18, N_EXPERTS)] * 2
    same = torch.zeros(1000, N_EXPERTS)
    same[:, :TOP_K] = 10.0
    assert balance_loss([torch.randn(1000, N_EXPERTS)]) < balance_loss([same])
