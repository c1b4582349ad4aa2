"""Sizes of the recurrent states of a model, found by its own code on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from math import prod

import torch
from torch import nn

from backends.recurrent.functions import is_mixer
from backends.recurrent.kinds import Recurrence, Rows
from backends.recurrent.no_states import NoStates
from backends.recurrent.passes import RecurrentPass, running
from backends.recurrent.states import Place


@dataclass(frozen=True)
class TensorSpec:
    """Shape and dtype of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def n_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PlaceShape:
    """One recurrence of a layer: its state, and what one token feeds to it."""

    state: TensorSpec
    fed: tuple[TensorSpec, ...]


class _Measured(RecurrentPass):
    """A pass that notes shapes."""

    def __init__(self) -> None:
        super().__init__(())
        self.shapes: dict[Place, PlaceShape] = {}

    def run(self, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        state = recurrence.initial(rows)
        fed = tuple(TensorSpec(tuple(x.shape[1:]), x.dtype) for x in rows)
        spec = TensorSpec(tuple(state.shape), state.dtype)
        self.shapes[self.next_place()] = PlaceShape(spec, fed)
        return recurrence.advance(state, rows)[1]


def measure_states(
    layers: Sequence[nn.Module], hidden_size: int, dtype: torch.dtype
) -> Mapping[Place, PlaceShape]:
    """Return the shapes of all recurrences of layers whose parameters are on the meta device."""
    measured = _Measured()
    hidden = torch.empty(1, 2, hidden_size, dtype=dtype, device="meta")
    with running(measured), torch.inference_mode():
        for index, layer in enumerate(layers):
            measured.begin_layer(index, 0)
            for mixer in filter(is_mixer, layer.modules()):
                parameters = signature(mixer.forward).parameters
                cache = next(name for name in parameters if name in _CACHES)
                with _buffers_on_meta(mixer):
                    mixer(hidden, **{cache: NoStates()})
    return measured.shapes


@contextmanager
def _buffers_on_meta(module: nn.Module) -> Iterator[None]:
    """Put a module's buffers beside its parameters, on the meta device, for a while."""
    before = [(part, name, x) for part in module.modules() for name, x in part._buffers.items()]
    for part, name, x in before:
        part._buffers[name] = None if x is None else x.to("meta")
    try:
        yield
    finally:
        for part, name, x in before:
            part._buffers[name] = x


_CACHES = ("cache_params", "past_key_values", "past_key_value")
"""Names of the cache among the arguments of recurrent layers."""
