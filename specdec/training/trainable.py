"""Trainable, the interface of a draft in training; one file for each kind of draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from specdec.training.data import Batch
from specdec.training.loss import TopKTargets, top_k_loss

MAX_CHAIN = 8
"""Tokens of the chains that a draft is measured by."""
_LOSS_ROWS = 256
"""Rows of logits in memory at a time."""


class Trainable(ABC):
    """A draft with float32 weights.

    Attributes:
        module: its trained parameters.
        hidden_layers: layers of the target whose hidden states it takes (see
            Backend.collect_hidden_states); () for a model of its own.
        hidden_size: width of its layers, which the learning rate follows.
        max_length: maximum tokens of a sequence.
        dtype: number format that it is saved in.
        first_position: first token of a sequence that it can draft after.
        is_new: whether its weights are random so far.
    """

    hidden_layers: tuple[int, ...] = ()
    module: nn.Module
    hidden_size: int
    max_length: int
    dtype: torch.dtype = torch.bfloat16
    is_new: bool = False
    first_position: int = 0

    @abstractmethod
    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean loss of a batch."""

    @abstractmethod
    def agreements(self, batch: Batch, depth: int) -> torch.Tensor:
        """Return bool [depth, batch_size, length]: whether the draft's token `s` steps after the
        text up to position i, the text's own tokens given up to there, is the target's likeliest
        after position i + s. False where the target's is not known."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write the draft into a folder that is there, for `-md`."""

    @property
    def frozen_bytes(self) -> int:
        """Memory of weights that are not trained."""
        return 0

    def to(self, device: torch.device) -> None:
        self.module.to(device)

    @torch.no_grad()
    def round_weights(self) -> None:
        """Round the weights to the number format that they are saved in."""
        for parameter in self.module.parameters():
            parameter.copy_(parameter.to(self.dtype))


def in_bf16(device: torch.device) -> torch.autocast:
    """Return the context in which products are computed in bf16, where that is fast."""
    # Without such instructions bf16 products take six to ten times as long as float32's.
    is_fast = device.type == "cuda" or torch.cpu._is_avx512_bf16_supported()
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_fast)


def likeliest(batch: Batch) -> torch.Tensor:
    """Return the target's likeliest token after each position, or -1: [batch_size, length]."""
    tokens = torch.full_like(batch.token_ids, -1)
    tokens[batch.windows, batch.positions] = batch.targets.ids[:, 0]
    return tokens


def rows_loss(
    states: torch.Tensor, head: nn.Module, targets: TopKTargets, vocab_size: int
) -> torch.Tensor:
    """Return the mean loss of the output head's logits of states [m, hidden].

    Logits are computed twice and never stored for all rows: a large vocabulary takes more memory
    than the draft.
    """

    def part(states: torch.Tensor, targets: TopKTargets) -> torch.Tensor:
        return top_k_loss(targets, head(states)[:, :vocab_size]) * len(states)

    total = states.new_zeros((), dtype=torch.float32)
    for start in range(0, len(states), _LOSS_ROWS):
        rows = slice(start, start + _LOSS_ROWS)
        of_rows = TopKTargets(*(column[rows] for column in targets))
        total = total + checkpoint(part, states[rows], of_rows, use_reentrant=False)
    return total / len(states)
