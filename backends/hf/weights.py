"""The torch backend's source of weights: everything that differs between the CPU and a GPU.

The backend computes with a model whose parameters are tensors on `device`; a `TorchWeights` loads
them there while they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from backends.contract.backend import TransferStats
from backends.packed.tensor import PackedTensor
from offload.ring.slots import Check

RawTensors = Mapping[str, torch.Tensor]
"""Bytes of each tensor by name, as stored in its file: uint8 [n_bytes] on the device."""

FetchExperts = Callable[
    [int, Sequence[int], Check | None],
    Generator[tuple[int, tuple[torch.Tensor, ...]], None, None],
]
"""(layer, experts, check) -> each of these experts once, in any order, with the bytes of its
tensors, valid until the next one. Must be exhausted or closed. Raises StorageError."""


class DecodesTensors(Protocol):
    """Products with the packed tensors of a module, and their decoding."""

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Decode the tensors of a module; the result is valid until the next call.

        stored: the parts of each tensor as uint8 [n_bytes]. Raises CheckpointError for bytes that
        are not a packed tensor.
        """

    def multiply(
        self,
        tensor: PackedTensor,
        stored: Sequence[torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return x [..., n_in] times a matrix [n_out, n_in], plus `bias`, as a linear layer does.

        Raises CheckpointError as `decode` does.
        """


class TorchWeights(Protocol):
    """The weights of one model, for repeated passes over its layers in order."""

    device: torch.device
    """Device of the tensors, and of the KV cache, masks and activations."""

    @property
    def decoder(self) -> DecodesTensors:
        """Decoder of the packed tensors."""

    fetch_experts: FetchExperts | None
    """Function that fetches the routed experts of a mixture; None for a dense model."""

    @property
    def non_layer(self) -> RawTensors:
        """Embeddings, final norm and head, valid until `close`."""

    def layer(self, index: int, check: Check | None = None) -> AbstractContextManager[RawTensors]:
        """Acquire the tensors of one layer, for computations that start inside the with-block.

        check: called repeatedly while waiting for the layer; an exception from it ends the wait.

        Raises StorageError as WeightStreamer.layer does.
        """

    def stays(self, index: int) -> bool:
        """Return whether the tensors of this layer stay at the same address until `close`."""

    @property
    def streams(self) -> bool:
        """Whether any layer is read, or copied to the device, for each pass."""

    def computing(self) -> AbstractContextManager[None]:
        """Context for all computation on the device: selects its stream and translates its errors.

        Raises BudgetExceeded if the device runs out of memory.
        """

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        """Wait for logits [n, vocab] that were computed inside `computing`; return float32."""

    def restart(self) -> None:
        """Start again at layer 0, as after an aborted pass."""

    @property
    def use(self) -> TransferStats:
        """Bytes read and copied since the load."""

    @property
    def unread_bytes(self) -> int:
        """See Backend."""

    @property
    def pinned_bytes(self) -> int:
        """See Backend."""

    def set_pinned_bytes(self, n_bytes: int) -> None:
        """See Backend."""

    def stop(self) -> bool:
        """End all threads, and a waiting pass with StreamerClosed; frees nothing yet."""

    def close(self) -> None:
        """Free threads, files and memory. Idempotent."""
