"""Checkpoint tensors bound to the modules of a model, and how they are stored."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from backends.contract.backend import UnsupportedModel
from backends.packed.decoder import PackedModule
from backends.packed.tensor import PackedTensor
from offload.formats.tensors import CheckpointError, TensorRecord

TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclass(frozen=True)
class BoundTensor:
    """A tensor of the checkpoint and the module attribute that it is loaded into."""

    module: nn.Module
    attribute: str
    record: TensorRecord
    packed: PackedTensor | None = None
    """Stored form of a tensor that must be decoded; None for a plain tensor."""
    is_float32: bool = False
    """Whether it is computed in float32, whatever the model's dtype."""
    parts: tuple[TensorRecord, ...] = ()
    """Stored tensors that it is the concatenation of, if it is not stored as one."""

    @property
    def stored(self) -> tuple[TensorRecord, ...]:
        return self.parts or ((self.record,) if self.packed is None else self.packed.parts)

    @property
    def computed_bytes(self) -> int:
        if self.packed is not None:
            return self.packed.decoded_bytes
        return sum(part.n_bytes for part in self.parts or (self.record,))


def packed_by_module(layer: Iterable[BoundTensor]) -> list[list[BoundTensor]]:
    """Return the packed tensors of a layer, grouped by module."""
    modules: dict[int, list[BoundTensor]] = {}
    for bound in layer:
        if bound.packed:
            modules.setdefault(id(bound.module), []).append(bound)
    return list(modules.values())


def packed_module(tensors: Sequence[BoundTensor]) -> PackedModule:
    """tensors: the packed tensors of one module."""
    packed = tuple(bound.packed for bound in tensors if bound.packed)
    is_linear = type(tensors[0].module) is nn.Linear and tensors[0].attribute == "weight"
    return PackedModule(packed, is_multiplied=is_linear and len(packed) == 1)


def is_view(record: TensorRecord, dtype: torch.dtype) -> bool:
    """Return whether a tensor of `dtype` can be a view of the record's bytes, as stored or as
    decoded."""
    stored = TORCH_DTYPES.get(record.dtype)
    return stored == dtype and (bool(record.scheme) or record.offset % dtype.itemsize == 0)


def converted_bytes(records: Iterable[TensorRecord], dtype: torch.dtype) -> int:
    """Return the bytes of the copies that these tensors need."""
    return sum(math.prod(r.shape) * dtype.itemsize for r in records if not is_view(r, dtype))


def bound_copies(bound: Iterable[BoundTensor], dtype: torch.dtype) -> int:
    """Return the bytes of the copies that the tensors of modules need, each record once."""
    bound = tuple(bound)
    by_name = {item.record.name: item for item in bound if not item.parts}.values()
    n_joined = sum(item.computed_bytes for item in bound if item.parts)
    wide = (item.record for item in by_name if item.is_float32)
    plain = (item.record for item in by_name if not item.is_float32)
    return n_joined + converted_bytes(wide, torch.float32) + converted_bytes(plain, dtype)


def joined(record: TensorRecord, parts: Sequence[TensorRecord]) -> TensorRecord:
    """Return the record of the concatenation of `parts`; of `record` itself without any."""
    if not parts:
        return record
    n_first = sum(part.shape[0] for part in parts)
    return replace(record, shape=(n_first, *record.shape[1:]))


def check_record(record: TensorRecord, shape: Sequence[int], name: str, directory: Path) -> None:
    """Raise CheckpointError for a wrong shape, UnsupportedModel for an unsupported dtype."""
    if tuple(record.shape) != tuple(shape):
        raise CheckpointError(
            f"{directory}: {record.name} has shape {list(record.shape)}, "
            f"the config asks for {list(shape)}: "
            "take the config.json that belongs to these weights"
        )
    if record.dtype not in TORCH_DTYPES:
        raise UnsupportedModel(
            f"{directory}: {name} is stored as {record.dtype}, and weights are read in "
            f"{', '.join(TORCH_DTYPES)} or quantised: take another version of the model"
        )
