"""Sizes of the recurrent states of a model, found by its own code on the meta device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from backends.recurrent.functions import is_mixer, use_recurrences
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
    recurrence: Recurrence = field(compare=False)
    """The kind, with tensors that have no memory."""


class _Measured(RecurrentPass):
    """A pass that notes shapes."""

    def __init__(self) -> None:
        super().__init__(())
        self.shapes: dict[Place, PlaceShape] = {}

    def run(self, recurrence: Recurrence, rows: Rows) -> torch.Tensor:
        state = recurrence.initial(rows)
        fed = tuple(TensorSpec(tuple(x.shape[1:]), x.dtype) for x in rows)
        spec = TensorSpec(tuple(state.shape), state.dtype)
        self.shapes[self.next_place()] = PlaceShape(spec, fed, _on_meta(recurrence))
        return recurrence.advance(state, rows)[1]


def recurrences_of(
    model: PreTrainedModel, layers: Sequence[nn.Module]
) -> Mapping[Place, PlaceShape]:
    """Let the recurrent layers of a model on the meta device compute within passes; return their
    shapes. Raises UnsupportedModel for a kind that is not known."""
    if not use_recurrences(model, layers):
        return {}
    hidden_size = model.get_input_embeddings().weight.shape[1]
    return measure_states(layers, hidden_size, model.dtype)


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


def _on_meta(recurrence: Recurrence) -> Recurrence:
    data: Any = recurrence  # every kind is a dataclass
    values = ((item.name, getattr(data, item.name)) for item in fields(data))
    tensors = {
        name: torch.empty_like(x, device="meta")
        for name, x in values
        if isinstance(x, torch.Tensor)
    }
    result: Recurrence = replace(data, **tensors)
    return result


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
