"""Losses of distillation: cross-entropy of a draft to its target's distribution.

Each has two terms. The first is KL(target || draft) up to the target's entropy, which is constant
(Hinton et al., 2015, at temperature 1). The second is the cross-entropy to the target's likeliest
token; it favours top-1 agreement, which is what greedy acceptance counts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

ARGMAX_WEIGHT = 0.3
"""Weight of the second term; the embedded pair was trained with it."""
_MIN_REST = 1e-6
"""Minimum probability of all tokens beyond the k likeliest, where its logarithm is taken."""


class TopKTargets(NamedTuple):
    """Distributions of the target: its k likeliest tokens, likeliest first, and the rest."""

    ids: torch.Tensor
    """int64 [m, k]"""
    logprobs: torch.Tensor
    """float32 [m, k]"""
    rest: torch.Tensor
    """float32 [m]: log of the probability of all other tokens."""

    def rows(self, index: torch.Tensor) -> TopKTargets:
        """Return the distributions of some rows."""
        return TopKTargets(*(column[index] for column in self))


def soft_loss(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, argmax_weight: float = ARGMAX_WEIGHT
) -> torch.Tensor:
    """Return the mean loss of logits [batch_size, length, vocab_size] of both."""
    target_logits = target_logits.flatten(0, 1)
    log_q = draft_logits.float().flatten(0, 1).log_softmax(-1)
    best, probs = target_logits.argmax(-1), target_logits.softmax(-1)
    return -(probs * log_q).sum(-1).mean() + argmax_weight * F.nll_loss(log_q, best)


def top_k_loss(
    targets: TopKTargets, draft_logits: torch.Tensor, argmax_weight: float = ARGMAX_WEIGHT
) -> torch.Tensor:
    """Return the mean loss of the draft's logits [m, vocab_size].

    Tokens beyond the k likeliest are one class: the target's probabilities of them are not known
    one by one.
    """
    log_q = draft_logits.float().log_softmax(-1).gather(1, targets.ids)
    log_rest = (1.0 - log_q.exp().sum(-1)).clamp(min=_MIN_REST).log()
    soft = (targets.logprobs.exp() * log_q).sum(-1) + targets.rest.exp() * log_rest
    return -(soft + argmax_weight * log_q[:, 0]).mean()
