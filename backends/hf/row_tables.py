"""Embeddings whose rows are read when tokens need them, instead of staying in memory.

Gemma 3n and 4 have an embedding for each layer in one table, which is larger than all their layers,
and of which a token needs one row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from inspect import signature
from typing import TYPE_CHECKING

import torch
from torch import nn

from backends.checkpoint.records import TORCH_DTYPES, BoundTensor
from offload.formats.part import read_part
from offload.formats.tensors import TensorRecord
from offload.storage.direct_io import StorageError

if TYPE_CHECKING:
    from backends.hf.model import HfModel


def tables_of(model: HfModel) -> Iterator[BoundTensor]:
    """Yield the embeddings beside the layers that are at least as large as that of the tokens, and
    serve in one place."""
    tokens = model.model.get_input_embeddings()
    names = [bound.record.name for bound in model.non_layer_tensors]
    of_tokens = (b.record.n_bytes for b in model.non_layer_tensors if b.module is tokens)
    n_bytes = max(of_tokens, default=0)
    for bound in model.non_layer_tensors:
        is_table = _is_of_ids(bound.module) and bound.module is not tokens
        is_single = names.count(bound.record.name) == 1 and not bound.parts
        if is_table and is_single and bound.record.n_bytes >= n_bytes > 0:
            yield bound


def _is_of_ids(module: nn.Module) -> bool:
    """Return whether a module is an embedding that is given ids alone; OPT's positions are not."""
    return isinstance(module, nn.Embedding) and len(signature(type(module).forward).parameters) == 2


def resident_records(model: HfModel) -> list[TensorRecord]:
    """Return the tensors beside the layers that stay in memory."""
    tables = {bound.record.name for bound in tables_of(model)}
    return [record for record in model.non_layer_records if record.name not in tables]


def row_bytes(model: HfModel) -> int:
    """Return the bytes of one token's rows."""
    return sum(math.prod(b.record.shape[1:]) * model.dtype.itemsize for b in tables_of(model))


class RowTable:
    """The forward of an embedding, with the rows of its input alone in memory.

    Args:
        dtype: what the model computes in.
    """

    def __init__(self, bound: BoundTensor, dtype: torch.dtype) -> None:
        self._module, self._record = bound.module, bound.record
        self._dtype = torch.float32 if bound.is_float32 else dtype
        self._weight = self._module._parameters[bound.attribute]
        self._forward, self._replaced = self._module.forward, self._module.__dict__.get("forward")
        self._module.forward = self
        # An index of the whole table, which matters in training alone.
        self._padding, self._module.padding_idx = getattr(self._module, "padding_idx", None), None

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows, places = token_ids.unique(return_inverse=True)
        self._module._parameters["weight"] = self._read(rows.tolist())
        try:
            output: torch.Tensor = self._forward(places)
            return output
        finally:
            self._module._parameters["weight"] = self._weight

    def _read(self, rows: list[int]) -> torch.Tensor:
        """Return these rows of the table. Raises StorageError."""
        record = self._record
        n_bytes = record.n_bytes // record.shape[0]
        stored = bytearray(len(rows) * n_bytes)
        for i, row in enumerate(rows):
            try:
                part = read_part(record.path, record.offset + row * n_bytes, n_bytes)
            except OSError as error:
                raise StorageError(f"{record.path} cannot be read: {error.strerror}") from error
            if len(part) < n_bytes:
                raise StorageError(f"{record.path} ends within {record.name}: it was cut")
            stored[i * n_bytes : (i + 1) * n_bytes] = part
        dtype = TORCH_DTYPES[record.dtype]
        return torch.frombuffer(stored, dtype=dtype).view(len(rows), -1).to(self._dtype)

    def detach(self) -> None:
        """Restore the module's own forward. Idempotent."""
        self._module.__dict__.pop("forward", None)
        self._module.padding_idx = self._padding
        if self._replaced is not None:
            self._module.forward = self._replaced
