"""Training of the embedded mixture of experts, distilled from the embedded target.

    python -m bench.train.moe -o specdec/pair/moe --corpus .venv/lib/python3.11/site-packages

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`, where `early` is a checkpoint to develop against while training runs.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM, Qwen3MoeForCausalLM

from bench.train.card import corpus_section, top1_agreement
from bench.train.data import WindowSampler, validation_batches
from bench.train.distil import distillation_loss
from bench.train.mixture import N_EXPERTS, TOP_K, balance_loss, build_mixture, router_logits
from bench.train.model import next_token_loss, save_checkpoint
from bench.train.train import EARLY_CARD, prepare_data
from bench.train.trainer import Phase, Trainer, TrainOptions, TrainState, larger
from specdec.training.loss import ARGMAX_WEIGHT

log = logging.getLogger(__name__)

PHASES = (Phase(0.85, 4, 256), Phase(1.0, 1, 1024))
BALANCE_WEIGHT = 0.01
# AdamW alone: Muon computes in bf16, which on a CPU without such products took 80 % of a step.
ADAM_LR = 0.0015
_VALID_ROWS, _VALID_LENGTH, _N_VALID = 4, 256, 24
PAIR = Path(__file__).parents[2] / "specdec" / "pair"


def mixture_loss(
    target: LlamaForCausalLM, model: Qwen3MoeForCausalLM, ids: torch.Tensor
) -> torch.Tensor:
    """Return the loss of ids [batch_size, length + 1]: distillation, and balance of experts."""
    with router_logits(model) as logits:
        loss = distillation_loss(target, model, ids, ARGMAX_WEIGHT)
    return loss + BALANCE_WEIGHT * balance_loss(logits)


@torch.no_grad()
def measure(
    target: LlamaForCausalLM, model: Qwen3MoeForCausalLM, draft: LlamaForCausalLM, valid: np.ndarray
) -> dict[str, float]:
    """Measure on held-out text: loss in nats per token, shares of positions where the pair's
    models have the mixture's top-1 token, and balance of experts."""
    batches = list(validation_batches(valid, _VALID_ROWS, _VALID_LENGTH))[:_N_VALID]
    with router_logits(model) as logits:
        ours = sum(next_token_loss(model, ids).item() for ids in batches) / len(batches)
    theirs = sum(next_token_loss(target, ids).item() for ids in batches) / len(batches)
    shares = [
        torch.bincount(torch.cat(layer).topk(TOP_K).indices.flatten(), minlength=N_EXPERTS).float()
        for layer in zip(*[iter(logits)] * len(model.model.layers), strict=True)
    ]
    used = torch.stack(shares).sum(0)
    return {
        "valid_nats_per_token": ours,
        "target_valid_nats_per_token": theirs,
        "draft_top1_agreement": top1_agreement(model, draft, batches),
        "target_top1_agreement": top1_agreement(model, target, batches),
        "busiest_expert_times_fair_share": float(used.max() / used.mean()),
        "idlest_expert_times_fair_share": float(used.min() / used.mean()),
    }


def card(quality: dict[str, float], state: TrainState, command: str, corpus: dict[str, Any]) -> str:
    """Return the model card; `corpus` is `train.summarise`'s."""
    rows = ((name.replace("_", " "), value) for name, value in quality.items())
    results = "\n".join(f"| {name} | {value:.3f} |" for name, value in rows)
    return f"""---
license: mit
library_name: transformers
---

# specdec embedded mixture of experts

A very small Qwen3-MoE of Python source: {N_EXPERTS} experts a layer, {TOP_K} of them for a token.
Distilled from the embedded target, whose tokenizer it has, and whose layers it began with. For
tests and benchmarks; it does not solve problems. All results below are on held-out files.

| | |
|---|---|
| training | {state.step} steps, {state.tokens / 1e6:.1f} M tokens, {state.elapsed_s / 60:.0f} min |
{results}

Made by `{command}`. Learning rates follow the clock, so another machine gives other weights.

The weights are released under the project's licence; the corpus and its licences are listed below.

{corpus_section(corpus)}"""


def main(
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of the checkpoint.")],
    corpus: Annotated[
        list[Path] | None, typer.Option(help="Folder of installed packages; may be repeated.")
    ] = None,
    minutes: Annotated[float, typer.Option(help="Training time.")] = 600,
    cap_mb: Annotated[float, typer.Option(help="Maximum text from one package, MB.")] = 1.5,
    seed: int = 1,
    threads: int = 1,
    device: Annotated[str, typer.Option(metavar="cpu|cuda", help="Where to train.")] = "cpu",
    batch_factor: Annotated[
        int, typer.Option(min=1, help="Windows a batch, in multiples of a CPU's.")
    ] = 1,
    pair: Annotated[Path, typer.Option(help="Folder of the target and its draft.")] = PAIR,
    scratch: Annotated[Path, typer.Option(help="Checkpoints and caches.")] = Path("moe-scratch"),
) -> None:
    """Distil the embedded target into a mixture of experts, and write it with its model card."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    data = prepare_data(scratch, corpus or [], int(cap_mb * 1e6), 0, seed, tokenizer)
    target = LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    target.eval().requires_grad_(False)
    model = build_mixture(target, seed).to(device)
    target.to(device)
    options = f"--minutes {minutes:g} --seed {seed} --device {device} --batch-factor {batch_factor}"
    command = f"python -m bench.train.moe {options}"

    def save_early_checkpoint(state: TrainState) -> None:
        save_checkpoint(model, tokenizer, scratch / "early", EARLY_CARD)

    trainer = Trainer(
        "moe",
        model,
        lambda ids: mixture_loss(target, model, ids),
        WindowSampler(data.train, seed),
        TrainOptions(minutes, larger(PHASES, batch_factor), muon_lr=None, adam_lr=ADAM_LR),
        scratch,
        save_early_checkpoint,
    )
    state = trainer.run()
    draft = LlamaForCausalLM.from_pretrained(pair / "draft", dtype=torch.float32)
    draft = draft.eval().to(device)
    quality = measure(target, model, draft, data.valid)
    log.info("%s", quality)
    save_checkpoint(model, tokenizer, out, card(quality, state, command, data.corpus))
    log.info("wrote %s", out)


if __name__ == "__main__":
    typer.run(main)
