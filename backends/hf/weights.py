"""Where the torch backend's weights come from: all that differs between the CPU and a GPU.

The backend computes with a model whose parameters are tensors of `device`; a `TorchWeights` brings
them there for the time in which they are needed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch

from backends.contract.backend import StreamUse
from backends.packed.tensor import PackedTensor
from offload.ring.slots import Check

RawTensors = Mapping[str, torch.Tensor]
"""By name, the bytes of each tensor as its file has them: uint8 [n_bytes] on the device."""

FetchExperts = Callable[
    [int, Sequence[int], Check | None],
    Generator[tuple[int, tuple[torch.Tensor, ...]], None, None],
]
"""(layer, experts, check): each of these experts once, in any order, with the bytes of its tensors,
which are valid until the next one. To be exhausted or closed. Raises StorageError."""


class DecodesTensors(Protocol):
    """Makes the tensors of a module from what is stored of them."""

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Valid until the next call. stored: of each, its parts as uint8 [n_bytes].

        Raises CheckpointError for bytes that are no packed tensor.
        """

    def decode_pieces(
        self, tensor: PackedTensor, stored: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """A matrix [n_out, n_in], some rows after the others, each valid until the next.

        Raises CheckpointError as `decode` does.
        """


class TorchWeights(Protocol):
    """The weights of one model, for passes over its layers in order, again and again."""

    device: torch.device
    """Where the tensors are handed out, and the KV cache, masks and activations live."""

    @property
    def decoder(self) -> DecodesTensors:
        """Of the packed tensors among them."""

    fetch_experts: FetchExperts | None
    """Where the routed experts of a mixture come from; None where there are none."""

    @property
    def non_layer(self) -> RawTensors:
        """Embeddings, final norm and head, valid until `close`."""

    def layer(self, index: int, check: Check | None = None) -> AbstractContextManager[RawTensors]:
        """The tensors of one layer, valid for computations that are begun inside the with-block.

        check: called again and again while the layer is waited for; what it raises ends the wait.

        Raises StorageError as WeightStreamer.layer does.
        """

    def stays(self, index: int) -> bool:
        """Whether the tensors of this layer are the same, at the same place, until `close`."""

    @property
    def streams(self) -> bool:
        """Whether any layer is read, or copied to the device, for each pass."""

    def computing(self) -> AbstractContextManager[None]:
        """Around all computation on the device: its stream, and its errors as errors of ours.

        Raises BudgetExceeded where the device's memory does not suffice.
        """

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        """Logits [n, vocab] that were computed inside `computing`, in float32; waits for them."""

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up."""

    @property
    def use(self) -> StreamUse:
        """Traffic since the load."""

    @property
    def unread_bytes(self) -> int:
        """See Backend."""

    @property
    def pinned_bytes(self) -> int:
        """See Backend."""

    def pin_layers(self, n_bytes: int) -> None:
        """See Backend."""

    def stop(self) -> bool:
        """End all threads, and with StreamerClosed a pass that waits; nothing is freed yet."""

    def close(self) -> None:
        """Give threads, files and memory back. Idempotent."""
