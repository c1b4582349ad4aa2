"""Evaluation of the finished pair, and its model cards."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import LlamaForCausalLM

from bench.train.data import END_OF_TEXT, validation_batches
from bench.train.distil import continue_prompts, opening_prompts
from bench.train.model import forward_logits, next_token_loss
from bench.train.trainer import TrainState

EVALUATED_PROMPTS = 32
EVALUATED_TOKENS = 128
# Written for the card; none is a benchmark's problem.
SAMPLE_PROMPTS = (
    'def read_lines(path: str) -> list[str]:\n    """Return all lines of a file."""\n    with',
    "import os\n\n\nclass Cache:\n    def __init__(self, size, name=None):\n        self.size =",
    "def is_valid(value):\n    if not isinstance(value, str):\n        raise",
)


@dataclass(frozen=True)
class PairQuality:
    """Quality of the pair: losses in nats per token; agreements as shares of equal top-1 tokens."""

    target_loss: float
    draft_loss: float
    bytes_per_token: float
    agreement_held_out: float
    agreement_greedy: float  # on the target's own greedy continuations
    agreement_sampled: float  # on its continuations at T = 0.7

    def bits_per_byte(self, loss: float) -> float:
        return loss / math.log(2) / self.bytes_per_token


@torch.no_grad()
def validation_loss(model: LlamaForCausalLM, stream: np.ndarray, length: int = 512) -> float:
    """Return the mean loss in nats per token over a held-out stream."""
    losses = [next_token_loss(model, ids).item() for ids in validation_batches(stream, 4, length)]
    return sum(losses) / len(losses)


@torch.no_grad()
def top1_agreement(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    batches: Iterable[torch.Tensor],
    skipped: int = 0,
) -> float:
    """Return the share of positions, after the first `skipped`, with the same top-1 token."""
    same = total = 0
    for ids in batches:
        expected = forward_logits(target, ids[:, :-1]).argmax(-1)[:, skipped:]
        drafted = forward_logits(draft, ids[:, :-1]).argmax(-1)[:, skipped:]
        same += int((expected == drafted).sum())
        total += expected.numel()
    return same / max(1, total)


def measure_pair(
    target: LlamaForCausalLM,
    draft: LlamaForCausalLM,
    valid: np.ndarray,
    valid_bytes: int,
    separator: int,
    seed: int,
) -> PairQuality:
    """Measure both models on held-out files, and the draft on the target's own output."""
    prompts = opening_prompts(valid, separator, EVALUATED_PROMPTS, seed)
    generator = torch.Generator(target.device).manual_seed(seed)

    def own_text_agreement(temperature: float) -> float:
        ids = continue_prompts(target, prompts, EVALUATED_TOKENS, temperature, generator)
        return top1_agreement(target, draft, ids.split(8), skipped=prompts.shape[1] - 1)

    return PairQuality(
        target_loss=validation_loss(target, valid),
        draft_loss=validation_loss(draft, valid),
        bytes_per_token=valid_bytes / len(valid),
        agreement_held_out=top1_agreement(target, draft, validation_batches(valid, 4, 512)),
        agreement_greedy=own_text_agreement(0.0),
        agreement_sampled=own_text_agreement(0.7),
    )


def sample_outputs(model: LlamaForCausalLM, tokenizer: Tokenizer) -> list[str]:
    """Return greedy continuations of `SAMPLE_PROMPTS`, cut where the model ends the document."""
    outputs = []
    separator = tokenizer.token_to_id(END_OF_TEXT)
    for prompt in SAMPLE_PROMPTS:
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        row = continue_prompts(model, ids, 96, 0.0, torch.Generator(model.device))[0].tolist()
        end = row.index(separator) if separator in row else len(row)
        outputs.append(tokenizer.decode(row[:end]).rstrip())
    return outputs


def hardware(device: torch.device) -> str:
    """Return the name of what a model was trained on, for its card."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}, torch {torch.__version__}"
    return f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration, IndexError):
        return platform.processor() or platform.machine()


def training_of(state: TrainState) -> str:
    """Return the steps, tokens and time of a training run, for the model's card."""
    return f"{state.step} steps, {state.tokens / 1e6:.1f} M tokens, {state.elapsed_s / 60:.0f} min"


def corpus_section(summary: dict[str, Any]) -> str:
    """Return the corpus section with sources and licences; `summary` is `train.summarise`'s."""
    rows = "\n".join(
        f"| {s['name']} | {s['version']} | {s['licence']} | {s['n_files']} | {s['n_bytes']:,} |"
        for s in summary["sources"]
    )
    total = sum(s["n_bytes"] for s in summary["sources"])
    return f"""## Corpus

{summary["train_files"]} Python files and {summary["train_functions"]} documented functions cut \
from them, {total / 1e6:.0f} MB before that;
{summary["valid_files"]} files ({summary["valid_bytes"]:,} bytes), chosen by hash, were held out.
Only distributions whose metadata states a permissive licence were read. Test folders, vendored
code, generated files and tables were left out, duplicates dropped.

| distribution | version | licence | files | bytes |
|---|---|---|---|---|
{rows}
"""


def pair_card(
    role: str,
    model: LlamaForCausalLM,
    quality: PairQuality,
    states: dict[str, TrainState],
    corpus: dict[str, Any],
    samples: list[str],
    recipe: dict[str, Any],
) -> str:
    """Return the model card of `role`, "target" or "draft"."""
    config = model.config
    n_weights = sum(p.numel() for p in model.parameters())
    loss = quality.target_loss if role == "target" else quality.draft_loss
    made = "trained" if role == "target" else "distilled from the target"
    shown = "\n".join(f"```python\n{text}\n```\n" for text in samples)
    return f"""---
license: mit
library_name: transformers
---

# specdec embedded pair: the {role}

A very small Llama-architecture model of Python source, {made} for demonstrations, tests and
benchmarks of speculative decoding that need no download. It writes text that looks like Python; it
does not solve problems.

| | |
|---|---|
| weights | {n_weights:,}, bf16 |
| layers, hidden, intermediate | {config.num_hidden_layers}, {config.hidden_size}, \
{config.intermediate_size} |
| heads, head dimension | {config.num_attention_heads}, {config.head_dim} |
| vocabulary | {config.vocab_size}, byte-level BPE with GPT-2's pre-tokenizer, tied head |
| training | {training_of(states[role])} |
| validation loss | {loss:.3f} nats per token, {quality.bits_per_byte(loss):.3f} bits per byte |
| draft's top-1 agreement with the target | {quality.agreement_held_out:.3f} on held-out files, \
{quality.agreement_greedy:.3f} on the target's greedy text, \
{quality.agreement_sampled:.3f} on its text at T = 0.7 |
| hardware | {hardware(model.device)} |

Made by `python -m bench.train.train`: {json.dumps(recipe)}. Learning rates follow the clock, so
another machine gives other weights.

The weights are released under the project's licence; the corpus and its licences are listed below.

## What it writes (greedy, the target)

{shown}
{corpus_section(corpus)}"""
