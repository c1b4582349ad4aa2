"""HeadTarget: the model that a draft head is made for, of any format, before it is loaded."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from backends.contract.backend import Backend
from backends.contract.source import ModelCompute
from backends.hf.model import HfModel
from offload.formats.comparing import have_same_bytes
from offload.formats.tensors import TensorRecord


class HeadTarget(ABC):
    """Sizes of a target, and modules of it that a head shares. They compute once the target is
    loaded: see `bind`."""

    hidden_size: int
    n_layers: int
    vocab_size: int
    """Columns of the logits."""
    dtype: torch.dtype | None
    """Number format that heads are computed in; None: each in its own."""
    output_bytes: int | None = None
    """Bytes of the output head; None: those of a matrix in the head's number format."""

    @abstractmethod
    def embedding(self, dtype: torch.dtype) -> nn.Module:
        """Return the embedding, whose rows have that number format."""

    @abstractmethod
    def output_head(self) -> nn.Module:
        """Return the output head, [..., hidden] -> logits [..., vocab_size]."""

    @abstractmethod
    def is_embedding(self, record: TensorRecord) -> bool:
        """Return whether a tensor of a head is a copy of the target's embedding."""

    def check_layers(self, layers: Sequence[int], head: Path) -> None:  # noqa: B027 (optional)
        """Raise UnsupportedModel if passes cannot return the outputs of these layers."""

    def with_output_head(self, compute: ModelCompute) -> ModelCompute:
        """Return a head's compute times with those of this output head."""
        return compute

    def bind(self, owner: Backend) -> None:  # noqa: B027 (optional)
        """Let the shared modules use the weights of the loaded target."""


@dataclass(frozen=True)
class CheckpointTarget(HeadTarget):
    """A checkpoint on torch, whose modules a head uses as they are."""

    model: HfModel

    @property
    def hidden_size(self) -> int:  # type: ignore[override]
        return int(self.model.config.hidden_size)

    @property
    def n_layers(self) -> int:  # type: ignore[override]
        return len(self.model.layers)

    @property
    def vocab_size(self) -> int:  # type: ignore[override]
        return self.model.vocab_size

    @property
    def dtype(self) -> torch.dtype:  # type: ignore[override]
        return self.model.dtype

    def embedding(self, dtype: torch.dtype) -> nn.Module:
        module: nn.Module = self.model.model.get_input_embeddings()
        return module

    def output_head(self) -> nn.Module:
        module: nn.Module = self.model.model.get_output_embeddings()
        return module

    def is_embedding(self, record: TensorRecord) -> bool:
        tokens = self.model.model.get_input_embeddings()
        own = [bound.record for bound in self.model.non_layer_tensors if bound.module is tokens]
        return any(have_same_bytes(record, other) for other in own)
