"""Short causal convolutions: each channel of a token with the few before it (LFM2, Mamba, GDN)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers.activations import ACT2FN

from backends.feedforward.elementwise import by_rows
from backends.recurrent.kinds import Recurrence, Rows, State


@dataclass(frozen=True)
class Convolution(Recurrence):
    """A convolution of each channel on its own; its state is the last inputs.

    weight: [channels, width]; bias: [channels] or None; activation: transformers' name, or None.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    activation: str | None

    def initial(self, rows: Rows) -> State:
        (x,) = rows
        return x.new_zeros(self.weight.shape[1] - 1, x.shape[1])

    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        (x,) = rows
        width, n_tokens = self.weight.shape[1], len(x)
        inputs = torch.cat([state, x])
        after = inputs[n_tokens:].clone()  # a view would keep all inputs in memory
        return after, self._sum([inputs[i : i + n_tokens] for i in range(width)])

    def branch(
        self, state: State, rows: Rows, parents: Sequence[int], requested: Sequence[int]
    ) -> list[torch.Tensor]:
        (x,) = rows
        n_before = len(state)
        inputs = torch.cat([state, x])
        # The inputs in each node's window, as rows of `inputs`; those of the state itself last.
        windows: list[list[int]] = [[]] * len(parents) + [[0, *range(n_before)]]
        for node, parent in enumerate(parents):
            windows[node] = [*windows[parent][1:], n_before + node]
        picked = inputs[torch.tensor([windows[node] for node in requested])]
        return list(self._sum(picked.unbind(1)).split(1))

    def _sum(self, terms: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the outputs for the inputs [tokens, channels] at each place of the window.

        One term after the other: the order of the sum does not depend on the number of tokens.
        """
        weight = self.weight.float()
        total = terms[0].float() * weight[:, 0]
        for i, term in enumerate(terms[1:], start=1):
            total = total + term.float() * weight[:, i]
        if self.bias is not None:
            total = total + self.bias.float()
        if self.activation is not None:
            total = self._function(total)
        return total.to(terms[0].dtype)

    @property
    def _function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return by_rows(ACT2FN[self.activation])
