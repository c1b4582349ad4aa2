"""Quality of a draft on held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from specdec.training.data import TrainingData
from specdec.training.trainable import MAX_CHAIN, Trainable


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
    n_positions = n_agreeing = n_accepted = 0
    for batch in data.held_out_batches():
        batch = batch.to(device)
        agreements = draft.agreements(batch, MAX_CHAIN)
        is_drafted = batch.positions >= draft.first_position
        chains = agreements.cumprod(0).sum(0)
        chains = chains[batch.windows[is_drafted], batch.positions[is_drafted]]
        n_positions += len(chains)
        n_agreeing += int((chains > 0).sum())
        n_accepted += int(chains.sum())
    return Quality(n_agreeing / n_positions, 1 + n_accepted / n_positions, n_positions)
