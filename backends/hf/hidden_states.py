"""Hidden states that a pass returns beside its logits, for draft heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from backends.contract.backend import LAST_HIDDEN_STATE, BackendError


class HiddenStates:
    """Outputs of some layers in one pass, of the tokens `rows`.

    Args:
        layers: see Backend.collect_hidden_states.
        rows: places of tokens in the pass, int64 [n].
    """

    def __init__(self, layers: Sequence[int], rows: torch.Tensor) -> None:
        self._layers, self._rows = layers, rows
        self._outputs: dict[int, torch.Tensor] = {}

    def note(self, layer: int, output: Any) -> None:
        """Keep the output of a layer, [1, tokens, hidden] or a tuple that begins with it."""
        if layer not in self._layers:
            return
        states = output[0] if isinstance(output, tuple) else output
        if states.ndim != 3:
            raise BackendError(
                "this family has several streams of hidden states, of which draft heads cannot be "
                "given one: use a draft model"
            )
        self._outputs[layer] = states[0].index_select(0, self._rows)

    @contextmanager
    def noting_last(self, decoder: nn.Module) -> Iterator[None]:
        """Note what the decoder returns, which is the last hidden state, while it runs inside."""

        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            self.note(LAST_HIDDEN_STATE, output[0])

        hook = decoder.register_forward_hook(note)
        try:
            yield
        finally:
            hook.remove()

    def joined(self) -> torch.Tensor:
        """Return the layers' outputs side by side: [n, len(layers) * hidden]."""
        return torch.cat([self._outputs[layer] for layer in self._layers], dim=-1)
