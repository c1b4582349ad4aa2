"""Distillation of the draft: its loss, its initial embedding, and the target's own output."""

from __future__ import annotations

import time

import numpy as np
import torch
from transformers import DynamicCache, LlamaForCausalLM, PreTrainedModel

from bench.train.model import forward_logits
from specdec.training.loss import soft_loss
from specdec.training.trainable import in_bf16

PROMPT_TOKENS = 48
CONTINUATION_TOKENS = 208  # with its prompt, one training window
GENERATE_PROMPTS = 128  # at a time
SAMPLE_TEMPERATURE = 0.7


def distillation_loss(
    target: LlamaForCausalLM, draft: PreTrainedModel, ids: torch.Tensor, argmax_weight: float
) -> torch.Tensor:
    """Return the mean `soft_loss` of windows of ids [batch_size, length + 1]."""
    with torch.no_grad():
        target_logits = forward_logits(target, ids[:, :-1]).float()
    return soft_loss(target_logits, forward_logits(draft, ids[:, :-1]), argmax_weight)


@torch.no_grad()
def project_embedding(target: LlamaForCausalLM, draft: LlamaForCausalLM) -> None:
    """Initialize the draft's (tied) embedding as the best approximation of the target's.

    The approximation has the draft's width, and preserves products of rows, so logits of tied
    heads, as well as possible.
    """
    table = target.get_input_embeddings().weight
    _, _, directions = torch.linalg.svd(table, full_matrices=False)
    width = draft.config.hidden_size
    draft.get_input_embeddings().weight.copy_(table @ directions[:width].T)


def opening_prompts(
    stream: np.ndarray, separator: int, n_prompts: int, seed: int, n_tokens: int = PROMPT_TOKENS
) -> torch.Tensor:
    """Return the first tokens [n_prompts, n_tokens] of documents, the separator included."""
    starts = np.flatnonzero(stream[: -n_tokens - 1] == separator)
    # A document shorter than its prompt would include the next one's beginning.
    following = np.append(starts[1:], len(stream))
    starts = starts[following - starts > n_tokens]
    rng = np.random.default_rng(seed)
    chosen = rng.choice(starts, size=min(n_prompts, len(starts)), replace=False)
    return torch.from_numpy(np.stack([stream[s : s + n_tokens] for s in chosen]).astype(np.int64))


@torch.no_grad()
def continue_prompts(
    model: LlamaForCausalLM,
    prompts: torch.Tensor,
    n_new: int,
    temperature: float,
    generator: torch.Generator,
) -> torch.Tensor:
    """Continue prompts [n, n_prompt] to ids [n, n_prompt + n_new]; temperature 0 is greedy."""
    cache = DynamicCache(config=model.config)
    ids = step = prompts.to(model.device)
    for _ in range(n_new):
        with in_bf16(model.device):
            output = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        logits = output.logits[:, -1].float()
        if temperature:
            probs = (logits / temperature).softmax(-1)
            step = torch.multinomial(probs, 1, generator=generator)
        else:
            step = logits.argmax(-1, keepdim=True)
        ids = torch.cat([ids, step], dim=1)
    return ids


def generate_stream(
    target: LlamaForCausalLM,
    stream: np.ndarray,
    separator: int,
    minutes: float,
    seed: int,
    batch_factor: int = 1,
) -> np.ndarray:
    """Generate output of the target, half greedy and half sampled, as one token stream.

    Acceptance depends on such output, which differs from the corpus.
    """
    generator = torch.Generator(target.device).manual_seed(seed)
    deadline = time.monotonic() + 60 * minutes
    n_prompts = batch_factor * GENERATE_PROMPTS
    parts: list[np.ndarray] = []
    while time.monotonic() < deadline or len(parts) < 2:
        prompts = opening_prompts(stream, separator, n_prompts, seed + len(parts))
        temperature = SAMPLE_TEMPERATURE if len(parts) % 2 else 0.0
        ids = continue_prompts(target, prompts, CONTINUATION_TOKENS, temperature, generator)
        parts.append(ids.cpu().numpy().astype(np.uint16).ravel())
    return np.concatenate(parts)
