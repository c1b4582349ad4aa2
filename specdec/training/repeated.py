"""RepeatedHead: a head of one layer in training, run repeatedly as drafting does (MTP, EAGLE-3).

Row i of step s has the head's input for token i + s, and predicts the token after that:

    target           h0  h1  h2  h3         hidden states after tokens t0, t1, ...
    step 1           t1  t2  t3  t4         with h0, h1, ...
    step 2           t2  t3  t4  t5         with the outputs of step 1

A draft begins after the accepted tokens of step 1, whose hidden states are the target's. So row i
of a later step attends to rows 0 to i of step 1, and to row i alone of the steps after it
(training-time test: EAGLE-3, Li et al. 2025, arXiv 2503.01840, section 3.2).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from specdec.training.data import Batch
from specdec.training.head import TargetHead
from specdec.training.trainable import in_bf16, likeliest, rows_loss

NUM_STEPS = 3
"""Tokens ahead that a head is trained for."""
STEP_WEIGHT = 0.6
"""Weight of a step's loss, in multiples of the one before: later tokens are drafted less often."""


class Step(NamedTuple):
    """Outputs [batch_size, length, hidden] of one step."""

    logit_states: torch.Tensor
    """Input of the output head."""
    states: torch.Tensor
    """Hidden states of the next step."""


class RepeatedHead(TargetHead):
    """A head that goes on from its own output. `_model` is a causal model of one layer."""

    _model: PreTrainedModel

    @abstractmethod
    def _run(
        self, token_ids: torch.Tensor, states: torch.Tensor, mask: torch.Tensor, cache: DynamicCache
    ) -> Step:
        """Run the head once.

        Args:
            token_ids: [batch_size, length]
            states: hidden states before the tokens: [batch_size, length, width].
            mask: additive [1, 1, length, cached + length].
        """

    def loss(self, batch: Batch) -> torch.Tensor:
        total = torch.zeros((), device=batch.token_ids.device)
        with in_bf16(batch.token_ids.device):
            for number, states in enumerate(self._steps(batch, NUM_STEPS), start=1):
                is_reached = batch.positions >= number
                windows = batch.windows[is_reached]
                rows = states[windows, batch.positions[is_reached] - number]
                targets = batch.targets.rows(is_reached)
                loss = rows_loss(rows, self._output_head, targets, self._vocab_size)
                total = total + STEP_WEIGHT**number * loss
        return total

    def agreements(self, batch: Batch, depth: int) -> torch.Tensor:
        expected = likeliest(batch)
        length = expected.shape[1]
        result = torch.zeros((depth, *expected.shape), dtype=torch.bool, device=expected.device)
        with in_bf16(batch.token_ids.device):
            steps = self._steps(batch, min(depth, length - 1))
            for number, states in enumerate(steps, start=1):
                tokens = self._output_head(states)[..., : self._vocab_size].argmax(-1)
                agrees = tokens[:, : length - number] == expected[:, number:]
                result[number - 1, :, 1 : 1 + agrees.shape[1]] = agrees
        return result

    def _steps(self, batch: Batch, count: int) -> Iterator[torch.Tensor]:
        """Yield the inputs of the output head [batch_size, length, hidden] of each step."""
        assert batch.hidden_states is not None, "the traces of a head have hidden states"
        states, cache = batch.hidden_states.float(), DynamicCache()
        for number in range(1, count + 1):
            # The last rows have tokens of the beginning: no distribution is known after them.
            token_ids = batch.token_ids.roll(-number, dims=1)
            mask = step_mask(token_ids.shape[1], number).to(states.device)
            step = self._run(token_ids, states, mask, cache)
            states = step.states
            yield step.logit_states


def step_mask(length: int, number: int) -> torch.Tensor:
    """Return the additive mask [1, 1, length, number * length] of a step, counted from 1."""
    first = torch.ones((length, length), dtype=torch.bool).tril()
    own = torch.eye(length, dtype=torch.bool)
    is_seen = torch.cat([first] + [own] * (number - 1), dim=1)
    mask = torch.zeros(is_seen.shape).masked_fill(~is_seen, torch.finfo(torch.float32).min)
    return mask[None, None]


def step_positions(token_ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    """Return the positions [1, length] of a step's tokens, by how many steps are cached."""
    length = token_ids.shape[1]
    number = cache.get_seq_length() // length
    return torch.arange(number, number + length, device=token_ids.device)[None]
