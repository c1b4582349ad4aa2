"""Training of a small NemotronH, distilled from the embedded target: Mamba-2 beside attention.

    python -m bench.train.nemotron -o DIR --corpus .venv/lib/python3.11/site-packages
    specdec-bench synth --from DIR --like nemotron-3-nano -o OUT

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tokenizers import Tokenizer
from torch import nn
from transformers import LlamaForCausalLM, NemotronHConfig, NemotronHForCausalLM

from bench.train.card import corpus_section, hardware, top1_agreement
from bench.train.data import MAX_POSITIONS, WindowSampler, validation_batches
from bench.train.distil import distillation_loss
from bench.train.hybrid import PHASES
from bench.train.model import next_token_loss, save_checkpoint
from bench.train.moe import PAIR
from bench.train.train import prepare_data
from bench.train.trainer import Trainer, TrainOptions, TrainState, larger
from specdec.training.loss import ARGMAX_WEIGHT

log = logging.getLogger(__name__)

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


def card(
    model: NemotronHForCausalLM,
    quality: dict[str, float],
    state: TrainState,
    command: str,
    corpus: dict[str, Any],
) -> str:
    """Return the model card; `corpus` is `train.summarise`'s."""
    results = "\n".join(f"| {n.replace('_', ' ')} | {value:.3f} |" for n, value in quality.items())
    return f"""---
library_name: transformers
---

# A very small NemotronH of Python source

Mamba-2 layers beside one of attention, distilled from specdec's embedded target, whose tokenizer it
has. To grow large models from, for benchmarks; it does not solve problems. All results below are on
held-out files.

| | |
|---|---|
| weights | {sum(p.numel() for p in model.parameters()):,}, bf16 |
| layers | {_LAYERS} |
| training | {state.step} steps, {state.tokens / 1e6:.1f} M tokens, {state.elapsed_s / 60:.1f} min |
{results}
| hardware | {hardware(model.device)} |

Made by `{command}`. Learning rates follow the clock, so another machine gives other weights.

{corpus_section(corpus)}"""


def main(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the checkpoint.")],
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Folder of installed packages; may be repeated.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Training time.")] = 120,
    cap_mb: Annotated[float, typer.Option(help="Maximum text from one package, MB.")] = 1.5,
    seed: int = 1,
    threads: int = 2,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
    batch_factor: Annotated[
        int, typer.Option(min=1, help="Windows a batch, in multiples of a CPU's.")
    ] = 1,
    pair: Annotated[Path, typer.Option(help="Folder of the target and its draft.")] = PAIR,
    scratch: Annotated[Path, typer.Option(help="Checkpoints and caches.")] = Path(
        "nemotron-scratch"
    ),
) -> None:
    """Distil the embedded target into a NemotronH, and write it with its model card."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    data = prepare_data(scratch, corpus or [], int(cap_mb * 1e6), 0, seed, tokenizer)
    target = LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    target.eval().requires_grad_(False).to(device)
    model = build_nemotron(target, seed).to(device)
    trainer = Trainer(
        "nemotron",
        model,
        lambda ids: distillation_loss(target, model, ids, ARGMAX_WEIGHT),
        WindowSampler(data.train, seed),
        TrainOptions(minutes, larger(PHASES, batch_factor)),
        scratch,
    )
    state = trainer.run()
    model.eval()
    with torch.no_grad():
        batches = list(validation_batches(data.valid, 4, 256))[:24]
        quality = {
            "valid_nats_per_token": sum(next_token_loss(model, x).item() for x in batches)
            / max(1, len(batches)),
            "target_top1_agreement": top1_agreement(model, target, batches),
        }
    log.info("%s", quality)
    options = f"--minutes {minutes:g} --seed {seed} --device {device} --batch-factor {batch_factor}"
    command = f"python -m bench.train.nemotron {options}"
    save_checkpoint(model, tokenizer, out, card(model, quality, state, command, data.corpus))
    log.info("wrote %s", out)


if __name__ == "__main__":
    typer.run(main)
