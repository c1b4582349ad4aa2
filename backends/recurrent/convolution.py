"""Short causal convolutions: each channel of a token with the few before it (LFM2, Mamba, GDN)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from transformers.activations import ACT2FN

from backends.feedforward.elementwise import by_rows
from backends.packed.kernels import has_numba
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
        if after.is_meta:
            return after, torch.empty_like(x)
        return after, self._outputs(inputs, [range(i, i + width) for i in range(n_tokens)])

    def branch(
        self, state: State, rows: Rows, parents: Sequence[int], requested: Sequence[int]
    ) -> list[torch.Tensor]:
        (x,) = rows
        n_before = len(state)
        # The inputs in each node's window, as rows of `inputs`; those of the state itself last.
        windows: list[list[int]] = [[]] * len(parents) + [[0, *range(n_before)]]
        for node, parent in enumerate(parents):
            windows[node] = [*windows[parent][1:], n_before + node]
        inputs = torch.cat([state, x])
        return list(self._outputs(inputs, [windows[node] for node in requested]).split(1))

    def _outputs(self, inputs: torch.Tensor, windows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the outputs for the windows, which are rows of the inputs [tokens, channels].

        One term after the other: the order of the sum does not depend on the number of tokens.
        """
        weight, places = self.weight.float(), torch.tensor([*map(list, windows)])
        if has_numba():
            from backends.recurrent.convolution_by_numba import weighted_sums

            total = weighted_sums(inputs.float(), weight.T.contiguous(), places)
        else:
            terms = [inputs[places[:, i]].float() * weight[:, i] for i in range(weight.shape[1])]
            total = reduce(torch.add, terms)
        if self.bias is not None:
            total = total + self.bias.float()
        if self.activation is not None:
            total = self._function(total)
        return total.to(inputs.dtype)

    @property
    def _function(self) -> Callable[[torch.Tensor], torch.Tensor]:
        return by_rows(ACT2FN[self.activation])
