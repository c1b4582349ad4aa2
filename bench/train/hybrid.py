"""Training of the embedded hybrid, distilled from the embedded target, and of its MTP head.

    python -m bench.train.hybrid -o specdec/pair/hybrid --corpus .venv/lib/python3.11/site-packages

It shares the pair's tokenizer, so that the pair's draft fits it. An interrupted run continues
from `--scratch`.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench.train.card import corpus_section, hardware, sample_outputs, top1_agreement
from bench.train.data import WindowSampler, validation_batches
from bench.train.hybrid_model import Hybrid, build_hybrid, hybrid_loss, mtp_agreement
from bench.train.model import next_token_loss, save_checkpoint
from bench.train.moe import PAIR
from bench.train.train import prepare_data
from bench.train.trainer import Phase, Trainer, TrainOptions, TrainState, larger
from specdec.training.loss import ARGMAX_WEIGHT
from specdec.training.repeated import NUM_STEPS

log = logging.getLogger(__name__)

PHASES = (Phase(0.85, 8, 256), Phase(1.0, 2, 1024))
_VALID_ROWS, _VALID_LENGTH, _N_VALID = 4, 256, 24


@torch.no_grad()
def measure(
    target: LlamaForCausalLM, model: Hybrid, draft: LlamaForCausalLM, valid: np.ndarray
) -> dict[str, float]:
    """Measure on held-out text: losses in nats per token, and shares of positions where other
    models, and each step of the MTP head, have the hybrid's top-1 token."""
    batches = list(validation_batches(valid, _VALID_ROWS, _VALID_LENGTH))[:_N_VALID]

    def loss(of: Any) -> float:
        return sum(next_token_loss(of, ids).item() for ids in batches) / len(batches)

    heads = np.mean([mtp_agreement(model, ids) for ids in batches], axis=0)
    return {
        "valid_nats_per_token": loss(model.main),
        "target_valid_nats_per_token": loss(target),
        "target_top1_agreement": top1_agreement(model.main, target, batches),
        "draft_top1_agreement": top1_agreement(model.main, draft, batches),
        **{f"mtp_step_{step}_top1_agreement": heads[step - 1] for step in range(1, NUM_STEPS + 1)},
    }


def card(
    model: Hybrid,
    quality: dict[str, float],
    state: TrainState,
    command: str,
    corpus: dict[str, Any],
    samples: list[str],
) -> str:
    """Return the model card; `corpus` is `train.summarise`'s."""
    config = model.config
    results = "\n".join(f"| {n.replace('_', ' ')} | {value:.3f} |" for n, value in quality.items())
    shown = "\n".join(f"```python\n{text}\n```\n" for text in samples)
    n_weights = sum(p.numel() for p in model.parameters())
    return f"""---
license: mit
library_name: transformers
---

# specdec embedded hybrid

A very small Qwen3.5 of Python source: recurrent layers (Gated DeltaNet) beside one of attention,
with an MTP head. Distilled from the embedded target, whose tokenizer it has. For tests and
benchmarks; it does not solve problems. All results below are on held-out files.

| | |
|---|---|
| weights | {n_weights:,}, bf16, those of the MTP head included |
| layers, hidden, intermediate | {config.num_hidden_layers}, {config.hidden_size}, \
{config.intermediate_size} |
| training | {state.step} steps, {state.tokens / 1e6:.1f} M tokens, {state.elapsed_s / 60:.1f} min |
{results}
| hardware | {hardware(model.device)} |

Made by `{command}`. Learning rates follow the clock, so another machine gives other weights.

The weights are released under the project's licence; the corpus and its licences are listed below.

## What it writes (greedy)

{shown}
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
    scratch: Annotated[Path, typer.Option(help="Checkpoints and caches.")] = Path("hybrid-scratch"),
) -> None:
    """Distil the embedded target into a hybrid, and write it with its MTP head and model card."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    torch.set_num_threads(threads)
    scratch.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(pair / "target" / "tokenizer.json"))
    data = prepare_data(scratch, corpus or [], int(cap_mb * 1e6), 0, seed, tokenizer)
    target = LlamaForCausalLM.from_pretrained(pair / "target", dtype=torch.float32)
    target.eval().requires_grad_(False).to(device)
    model = build_hybrid(target, seed).to(device)
    options = f"--minutes {minutes:g} --seed {seed} --device {device} --batch-factor {batch_factor}"
    trainer = Trainer(
        "hybrid",
        model,
        lambda ids: hybrid_loss(target, model, ids, ARGMAX_WEIGHT),
        WindowSampler(data.train, seed),
        TrainOptions(minutes, larger(PHASES, batch_factor)),
        scratch,
    )
    state = trainer.run()
    draft = LlamaForCausalLM.from_pretrained(pair / "draft", dtype=torch.float32).eval().to(device)
    quality = measure(target, model, draft, data.valid)
    log.info("%s", quality)
    samples = sample_outputs(model.main, tokenizer)
    command = f"python -m bench.train.hybrid {options}"
    text = card(model, quality, state, command, data.corpus, samples)
    head = {f"mtp.{name}": tensor for name, tensor in model.mtp.state_dict().items()}
    save_checkpoint(model.main, tokenizer, out, text, head)
    log.info("wrote %s", out)


if __name__ == "__main__":
    typer.run(main)
