"""Training of the embedded hybrid, distilled from the embedded target, and of its MTP head.

    python -m bench.train.hybrid -o specdec/pair/hybrid --corpus .venv/lib/python3.11/site-packages

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`.
"""

from __future__ import annotations

import numpy as np
import torch

from bench.train.card import top1_agreement
from bench.train.distilled import DistillationInputs, Recipe, mean_loss, run_recipe
from bench.train.hybrid_model import Hybrid, build_hybrid, hybrid_loss, mtp_agreement
from bench.train.trainer import Phase, TrainOptions
from specdec.training.loss import ARGMAX_WEIGHT
from specdec.training.repeated import NUM_STEPS

PHASES = (Phase(0.85, 8, 256), Phase(1.0, 2, 1024))


@torch.no_grad()
def measure(inputs: DistillationInputs, model: Hybrid) -> dict[str, float]:
    """Measure on held-out text: losses in nats per token, and shares of positions where other
    models, and each step of the MTP head, have the hybrid's top-1 token."""
    batches = inputs.valid_batches
    heads = np.mean([mtp_agreement(model, ids) for ids in batches], axis=0)
    return {
        "valid_nats_per_token": mean_loss(model.main, batches),
        "target_valid_nats_per_token": mean_loss(inputs.target, batches),
        "target_top1_agreement": top1_agreement(model.main, inputs.target, batches),
        "draft_top1_agreement": top1_agreement(model.main, inputs.draft, batches),
        **{f"mtp_step_{step}_top1_agreement": heads[step - 1] for step in range(1, NUM_STEPS + 1)},
    }


def sizes(model: Hybrid) -> dict[str, str]:
    """Return the row of the model card with the model's sizes."""
    config = model.config
    numbers = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    return {"layers, hidden, intermediate": ", ".join(map(str, numbers))}


RECIPE = Recipe(
    "hybrid",
    "specdec embedded hybrid",
    "A very small Qwen3.5 of Python source: recurrent layers (Gated DeltaNet) beside one of\n"
    "attention, with an MTP head, which the weights include.",
    TrainOptions(120, PHASES),
    build_hybrid,
    lambda target, model, ids: hybrid_loss(target, model, ids, ARGMAX_WEIGHT),
    measure,
    sizes,
    lambda model: model.main,
    lambda model: {f"mtp.{name}": tensor for name, tensor in model.mtp.state_dict().items()},
)

if __name__ == "__main__":
    run_recipe(RECIPE)
