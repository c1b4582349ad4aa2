"""Quality of a draft on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.training.data import Batch, TrainingData
from specdec.training.trainable import MAX_CHAIN, Trainable, likeliest


@dataclass(frozen=True)
class Quality:
    """Agreement of a draft with its target on text that it was not trained on."""

    agreement: float
    """Share of positions where the draft's likeliest token is the target's."""
    tokens_per_pass: float
    """Mean tokens of a forward pass with greedy chains of MAX_CHAIN draft tokens, the target's own
    token included: 1 + mean length of the part that agrees. The text's tokens stand for accepted
    ones, so it is an estimate; trees and n-grams bring more."""
    n_tokens: int
    """Positions that were measured."""

    @property
    def rank(self) -> tuple[float, float]:
        return self.tokens_per_pass, self.agreement


@torch.no_grad()
def measure(draft: Trainable, data: TrainingData, device: torch.device) -> Quality:
    """Measure a draft on the held-out part."""
    n_agreeing = 0
    lengths, complete = [], []
    for batch in data.held_out_batches():
        batch = batch.to(device)
        is_drafted = batch.positions >= draft.first_position
        rows = batch.windows[is_drafted], batch.positions[is_drafted]
        agreements = draft.agreements(batch, MAX_CHAIN)
        n_agreeing += int(agreements[0][rows].sum())
        chains = agreements.cumprod(0).sum(0)[rows]
        lengths.append(chains)
        complete.append(chains[_has_whole_chains(batch)[rows]])
    n_positions = sum(map(len, lengths))
    # Chains that the text's end cuts off count only where there are no whole ones.
    measured = torch.cat(complete if any(map(len, complete)) else lengths)
    tokens_per_pass = 1 + float(measured.double().mean())
    return Quality(n_agreeing / n_positions, tokens_per_pass, n_positions)


def _has_whole_chains(batch: Batch) -> torch.Tensor:
    """Return where the target's likeliest tokens are known for a chain: [batch_size, length]."""
    is_known = likeliest(batch) >= 0
    result = torch.zeros_like(is_known)
    n_starts = is_known.shape[1] - MAX_CHAIN + 1
    if n_starts > 0:
        result[:, :n_starts] = is_known.unfold(1, MAX_CHAIN, 1).all(-1)
    return result
