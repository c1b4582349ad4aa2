"""DecodedWeights: weights of a small model from a GGUF file, decoded once and all in memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch

from backends.contract.backend import TransferStats
from backends.heads.gguf_tensors import decoded
from backends.hf.model import HfModel
from backends.hf.weights import FetchExperts, RawTensors
from backends.packed.decoder import Decoder
from offload.formats.tensors import TensorRecord
from offload.ring.slots import Check


class DecodedWeights:
    """Implement TorchWeights on the CPU.

    Args:
        stored: the tensors in the file, by the names that the model's records have.
        rotary_heads: number of heads of each tensor whose rows llama.cpp has in the order of its
            RoPE: pairs of neighbours, where transformers pairs the halves of a head.
    """

    device = torch.device("cpu")
    fetch_experts: FetchExperts | None = None
    streams = False
    use = TransferStats()
    unread_bytes = 0
    pinned_bytes = 0

    def __init__(
        self,
        model: HfModel,
        stored: Mapping[str, TensorRecord],
        rotary_heads: Mapping[str, int],
    ) -> None:
        self.decoder = Decoder((), 1)
        self._stored, self._rotary_heads, self._dtype = stored, rotary_heads, model.dtype
        self._layers = [
            self._load(record for record in layer.tensors) for layer in model.layer_weights
        ]
        self._non_layer = self._load(iter(model.non_layer_records))

    def _load(self, records: Iterator[TensorRecord]) -> dict[str, torch.Tensor]:
        return {record.name: self._bytes_of(record.name) for record in records}

    def _bytes_of(self, name: str) -> torch.Tensor:
        numbers = decoded(self._stored[name], self._dtype)
        if name in self._rotary_heads:
            heads = numbers.view(self._rotary_heads[name], -1, 2, numbers.shape[-1])
            numbers = heads.transpose(1, 2).reshape(numbers.shape)
        return numbers.flatten().view(torch.uint8)

    @property
    def non_layer(self) -> RawTensors:
        return self._non_layer

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[RawTensors]:
        yield self._layers[index]

    def stays(self, index: int) -> bool:
        return True

    def computing(self) -> AbstractContextManager[None]:
        return nullcontext()

    def on_host(self, logits: torch.Tensor) -> np.ndarray:
        return logits.float().numpy()

    def restart(self) -> None:
        """Do nothing: no layer is read ahead."""

    def set_pinned_bytes(self, n_bytes: int) -> None:
        """Do nothing: no layer streams."""

    def stop(self) -> bool:
        return True

    def close(self) -> None:
        self._layers, self._non_layer = [], {}
        self.decoder.close()
