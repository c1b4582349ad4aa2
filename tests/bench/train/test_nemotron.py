"""The small NemotronH before training: a source of Nemotron 3 Nano's shape."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from bench.synth.hybrid import tensor_plans
from bench.synth.shapes import HYBRIDS
from bench.synth.source import SourceModel
from bench.train.distil import distillation_loss
from bench.train.nemotron import build_nemotron
from specdec.models.names import resolve_model


def test_it_learns_and_can_be_grown(tmp_path: Path) -> None:
    target = LlamaForCausalLM.from_pretrained(resolve_model("pair:target"), dtype=torch.float32)
    target.eval().requires_grad_(False)
    model = build_nemotron(target, seed=1)
    ids = torch.randint(0, 4096, (2, 33), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.002)
    losses = []
    for _ in range(6):
        loss = distillation_loss(target, model, ids, 0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    model.save_pretrained(tmp_path)
    plans = tensor_plans(SourceModel(tmp_path).shape, HYBRIDS["nemotron-3-nano"])
    assert sum(plan.n_weights for plan in plans) == HYBRIDS["nemotron-3-nano"].parameters
