"""Recurrence: the interface of one kind of recurrent layer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import torch

from backends.recurrent.walks import depth_first

State: TypeAlias = torch.Tensor
Rows: TypeAlias = tuple[torch.Tensor, ...]
"""Inputs of tokens to a layer beside its state, [tokens, ...] each."""


class Recurrence(ABC):
    """A function of a state and the inputs of tokens, one token after the other.

    A state is never changed in place: other branches and earlier passes may need it.
    """

    n_products: ClassVar[int] = 1
    """Products of each number of the state with a number of a token."""

    @abstractmethod
    def initial(self, rows: Rows) -> State:
        """Return the state before the first token, given inputs for their shapes and device."""

    @abstractmethod
    def advance(self, state: State, rows: Rows) -> tuple[State, torch.Tensor]:
        """Return (state after a chain of tokens, their outputs [tokens, ...]).

        A token's bits depend on the tokens before it alone, however many are given at a time.
        """

    def branch(
        self, state: State, rows: Rows, parents: Sequence[int], requested: Sequence[int]
    ) -> list[torch.Tensor]:
        """Return the outputs [1, ...] of the `requested` nodes of a forest below a state.

        parents: index of each node's parent, an earlier one; -1 for the state itself.
        """
        outputs: dict[int, torch.Tensor] = {}
        order, above, slots, _ = depth_first(parents)
        stack = {-1: state}
        for node, start, slot in zip(order, above.tolist(), slots.tolist(), strict=True):
            row = tuple(x[node : node + 1] for x in rows)
            stack[slot], outputs[node] = self.advance(stack[start], row)
        return [outputs[node] for node in requested]
