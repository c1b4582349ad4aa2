"""Heads that `specdec train-draft` trains, with random weights."""

from __future__ import annotations

import torch

from specdec.training.head import TargetHead


def with_random_weights(draft: TargetHead) -> TargetHead:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter.normal_(0.0, 0.25, generator=generator)
            if parameter.ndim == 1:
                parameter.add_(1.0)
    return draft
