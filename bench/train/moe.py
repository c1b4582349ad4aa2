"""Training of the embedded mixture of experts, distilled from the embedded target.

    python -m bench.train.moe -o specdec/pair/moe --corpus .venv/lib/python3.11/site-packages

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`, where `early` is a checkpoint to develop against while training runs.
"""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from bench.train.card import top1_agreement
from bench.train.distil import distillation_loss
from bench.train.distilled import DistillationInputs, Recipe, mean_loss, run_recipe
from bench.train.mixture import N_EXPERTS, TOP_K, balance_loss, build_mixture, router_logits
from bench.train.trainer import Phase, TrainOptions
from specdec.training.loss import ARGMAX_WEIGHT

PHASES = (Phase(0.85, 4, 256), Phase(1.0, 1, 1024))
BALANCE_WEIGHT = 0.01
# AdamW alone: Muon computes in bf16, which on a CPU without such products took 80 % of a step.
ADAM_LR = 0.0015


def mixture_loss(
    target: LlamaForCausalLM, model: Qwen3MoeForCausalLM, ids: torch.Tensor
) -> torch.Tensor:
    """Return the loss of ids [batch_size, length + 1]: distillation, and balance of experts."""
    with router_logits(model) as logits:
        loss = distillation_loss(target, model, ids, ARGMAX_WEIGHT)
    return loss + BALANCE_WEIGHT * balance_loss(logits)


@torch.no_grad()
def measure(inputs: DistillationInputs, model: Qwen3MoeForCausalLM) -> dict[str, float]:
    """Measure on held-out text: loss in nats per token, shares of positions where the pair's
    models have the mixture's top-1 token, and balance of experts."""
    batches = inputs.valid_batches
    with router_logits(model) as logits:
        loss = mean_loss(model, batches)
    shares = [
        torch.bincount(torch.cat(layer).topk(TOP_K).indices.flatten(), minlength=N_EXPERTS).float()
        for layer in zip(*[iter(logits)] * len(model.model.layers), strict=True)
    ]
    n_uses = torch.stack(shares).sum(0)
    return {
        "valid_nats_per_token": loss,
        "target_valid_nats_per_token": mean_loss(inputs.target, batches),
        "draft_top1_agreement": top1_agreement(model, inputs.draft, batches),
        "target_top1_agreement": top1_agreement(model, inputs.target, batches),
        "busiest_expert_times_fair_share": float(n_uses.max() / n_uses.mean()),
        "idlest_expert_times_fair_share": float(n_uses.min() / n_uses.mean()),
    }


RECIPE = Recipe(
    "moe",
    "specdec embedded mixture of experts",
    f"A very small Qwen3-MoE of Python source: {N_EXPERTS} experts a layer, {TOP_K} of them for a\n"
    "token. It began with the layers of the target.",
    TrainOptions(600, PHASES, muon_lr=None, adam_lr=ADAM_LR),
    build_mixture,
    mixture_loss,
    measure,
    threads=1,
)

if __name__ == "__main__":
    run_recipe(RECIPE)
