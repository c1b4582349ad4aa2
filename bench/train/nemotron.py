"""Training of a small NemotronH, distilled from the embedded target: Mamba-2 beside attention.

    python -m bench.train.nemotron -o DIR --corpus .venv/lib/python3.11/site-packages
    specdec-bench synth --from DIR --like nemotron-3-nano -o OUT

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`.
"""

from __future__ import annotations

import torch
from torch import nn
from transformers import LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM

from bench.train.card import top1_agreement
from bench.train.data import MAX_POSITIONS
from bench.train.distil import distillation_loss
from bench.train.distilled import DistillationInputs, Recipe, mean_loss, run_recipe
from bench.train.hybrid import PHASES
from bench.train.trainer import TrainOptions
from specdec.training.loss import ARGMAX_WEIGHT

_LAYERS = "M-M-M*-"  # Nemotron 3 Nano's first ones, with MLPs in place of experts
_KINDS = {"M": "linear_attention", "*": "full_attention", "-": "mlp"}


def nemotron_config(target: LlamaForCausalLM) -> NemotronHConfig:
    """Return the config of a NemotronH with the target's vocabulary, 8 MB in bf16.

    Groups, heads and states of Mamba-2 have the sizes of Nemotron 3 Nano's, to which it is grown.
    """
    config = target.config
    return NemotronHConfig(
        vocab_size=config.vocab_size,
        hidden_size=256,
        intermediate_size=704,
        layers_block_type=[_KINDS[letter] for letter in _LAYERS],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=128,
        mamba_num_heads=8,
        mamba_head_dim=64,
        n_groups=1,
        ssm_state_size=128,
        conv_kernel=4,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=None,
    )


def build_nemotron(target: LlamaForCausalLM, seed: int) -> NemotronHForCausalLM:
    """Return the model before its training, in float32; its layers begin as no-ops."""
    torch.manual_seed(seed)
    model = NemotronHForCausalLM(nemotron_config(target)).float()
    with torch.no_grad():
        for name, module in model.model.layers.named_modules():
            if isinstance(module, nn.Linear):
                is_output = name.endswith(("out_proj", "o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=0.0 if is_output else 0.02)
    return model


def measure(inputs: DistillationInputs, model: NemotronHForCausalLM) -> dict[str, float]:
    """Measure on held-out text: loss in nats per token, and share of positions where the target
    has the model's top-1 token."""
    batches = inputs.valid_batches
    return {
        "valid_nats_per_token": mean_loss(model, batches),
        "target_top1_agreement": top1_agreement(model, inputs.target, batches),
    }


RECIPE = Recipe(
    "nemotron",
    "A very small NemotronH of Python source",
    "Mamba-2 layers beside one of attention, to grow large models from.",
    TrainOptions(120, PHASES),
    build_nemotron,
    lambda target, model, ids: distillation_loss(target, model, ids, ARGMAX_WEIGHT),
    measure,
    lambda model: {"layers": _LAYERS},
)

if __name__ == "__main__":
    run_recipe(RECIPE)
