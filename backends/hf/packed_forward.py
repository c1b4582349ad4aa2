"""Modules whose weights are packed: decoded for each forward (backends/packed/decoder.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from backends.checkpoint.records import BoundTensor, packed_module
from backends.hf.weights import DecodesTensors, RawTensors


class PackedForward:
    """The forward of a module whose tensors are decoded each time it runs, into a buffer that all
    such modules share.

    tensors: the packed tensors of the module.
    """

    def __init__(
        self, tensors: Sequence[BoundTensor], decoder: DecodesTensors, dtype: torch.dtype
    ) -> None:
        self._tensors, self._decoder, self._dtype = tensors, decoder, dtype
        self._packed = [bound.packed for bound in tensors if bound.packed]
        self._stored: list[list[torch.Tensor]] = []
        self._module = tensors[0].module
        self._forward = self._module.forward
        self._module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check_bound()
        decoded = self._decoder.decode(self._packed, self._stored)
        for bound, tensor in zip(self._tensors, decoded, strict=True):
            self._module._parameters[bound.attribute] = tensor.to(self._dtype)
        try:
            return self._forward(*args, **kwargs)
        finally:
            unbind(self._tensors)

    def bind(self, tensors: RawTensors) -> None:
        """Set the stored bytes that the next forward decodes."""
        self._stored = [[tensors[part.name] for part in packed.parts] for packed in self._packed]

    def unbind(self) -> None:
        self._stored = []

    def detach(self) -> None:
        """Restore the module's own forward. Idempotent."""
        self.unbind()
        self._module.forward = self._forward

    def _check_bound(self) -> None:
        assert self._stored, "the module is used outside its layer's time"


class PackedLinear(PackedForward):
    """A linear layer, computed from the stored bytes of its matrix."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self._check_bound()
        bias: torch.Tensor | None = self._module._parameters["bias"]
        return self._decoder.multiply(self._packed[0], self._stored[0], x, bias)


def packed_forward(
    tensors: Sequence[BoundTensor], decoder: DecodesTensors, dtype: torch.dtype
) -> PackedForward:
    """Replace the forward of the module that has these packed tensors."""
    kind = PackedLinear if packed_module(tensors).is_multiplied else PackedForward
    return kind(tensors, decoder, dtype)


def unbind(bound: Sequence[BoundTensor]) -> None:
    """Replace parameters by meta tensors, so that a use while unbound raises an error."""
    for target in bound:
        meta = torch.empty(target.record.shape, device="meta")
        target.module._parameters[target.attribute] = meta
