"""The matrices of a checkpoint's experts, layer by layer."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias

import torch
from torch import nn
from transformers import PreTrainedModel

from backends.checkpoint.architecture import language_config
from backends.checkpoint.matching import TensorMatch
from backends.checkpoint.records import check_record
from backends.contract.backend import UnsupportedModel
from backends.feedforward.experts import Matrix
from backends.feedforward.records import experts_per_token, find_experts, is_experts, slice_record
from backends.hf.layer_runner import as_tensor
from backends.hf.weights import DecodesTensors, TorchWeights
from backends.packed.tensor import PackedTensor
from offload.formats.tensors import TensorRecord
from offload.placement.experts import LayerExperts
from offload.ring.slots import Check


@dataclass(frozen=True)
class ExpertMatrix:
    """A matrix of an expert: its decoded form, and the stored one if it must be decoded."""

    record: TensorRecord
    packed: PackedTensor | None = None

    @property
    def parts(self) -> tuple[TensorRecord, ...]:
        return (self.record,) if self.packed is None else self.packed.parts

    @property
    def computed_bytes(self) -> int:
        return self.record.n_bytes if self.packed is None else self.packed.decoded_bytes


ExpertMatrices: TypeAlias = tuple[tuple[ExpertMatrix, ...], ...]
"""The matrices of each expert of a layer, in the order in which they are used."""


@dataclass(frozen=True)
class StoredMatrix:
    """A packed matrix [n_out, n_in] of an expert that is in memory as it is stored."""

    decoder: DecodesTensors
    tensor: PackedTensor
    stored: Sequence[torch.Tensor]

    def multiply(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x [n, n_in] times the matrix, plus `bias`."""
        return self.decoder.multiply(self.tensor, self.stored, x, bias)


def fetch_matrices(
    weights: TorchWeights,
    dtype: torch.dtype,
    layer: int,
    own: ExpertMatrices,
    experts: Sequence[int],
    check: Check | None,
) -> Generator[tuple[int, list[Matrix]], None, None]:
    """Yield each of a layer's `experts` once, with its matrices, valid until the next.

    own: the matrices of each expert of the layer.
    """
    fetch = weights.fetch_experts
    assert fetch is not None, "the weights have no experts"
    with closing(fetch(layer, experts, check)) as fetched:
        for expert, tensors in fetched:
            left = iter(tensors)
            parts = [[next(left) for _ in matrix.parts] for matrix in own[expert]]
            matrices = [
                _loaded(matrix, stored, weights.decoder, dtype)
                for matrix, stored in zip(own[expert], parts, strict=True)
            ]
            yield expert, matrices


def _loaded(
    matrix: ExpertMatrix,
    parts: Sequence[torch.Tensor],
    decoder: DecodesTensors,
    dtype: torch.dtype,
) -> Matrix:
    """Return a matrix over the bytes of its parts; a packed one is decoded as it is multiplied."""
    if matrix.packed is None:
        return as_tensor(parts[0], matrix.record, dtype)
    return StoredMatrix(decoder, matrix.packed, parts)


def experts_by_layer(
    model: PreTrainedModel,
    layers_name: str,
    layers: tuple[nn.Module, ...],
    match: TensorMatch,
    packed: Mapping[str, PackedTensor],
    directory: Path,
) -> tuple[
    tuple[nn.Module | None, ...],
    tuple[LayerExperts | None, ...],
    tuple[ExpertMatrices | None, ...],
]:
    """Return (the module that computes the experts, the experts, their matrices) per layer; empty
    tuples if the model is dense."""
    modules: list[nn.Module | None] = []
    experts: list[LayerExperts | None] = []
    matrices: list[ExpertMatrices | None] = []
    for index, layer in enumerate(layers):
        matches = [(name, module) for name, module in layer.named_modules() if is_experts(module)]
        if len(matches) > 1:
            raise UnsupportedModel(
                f"{model.config.model_type} is not supported: layer {index} has {len(matches)} "
                "mixtures; take a GGUF file of it"
            )
        name, module = matches[0] if matches else ("", None)
        modules.append(module)
        if module is None:
            experts.append(None)
            matrices.append(None)
            continue
        whole = find_experts(
            f"{layers_name}.{index}.{name}",
            module,
            experts_per_token(language_config(model.config), len(module.down_proj)),
            match.find,
            lambda record, shape: check_record(record, shape, record.name, directory),
            str(directory),
        )
        own = tuple(
            tuple(_matrix(record, packed, i) for record in records)
            for i, records in enumerate(whole.tensors)
        )
        matrices.append(own)
        parts = tuple(tuple(r for matrix in expert for r in matrix.parts) for expert in own)
        experts.append(replace(whole, tensors=parts))
    if not any(experts):
        return (), (), ()
    return tuple(modules), tuple(experts), tuple(matrices)


def _matrix(record: TensorRecord, packed: Mapping[str, PackedTensor], expert: int) -> ExpertMatrix:
    """Return the matrix of a record: a tensor of the checkpoint, or an expert's part of one."""
    if not record.scheme:
        return ExpertMatrix(record)
    whole = packed.get(record.name)
    if whole is not None:
        return ExpertMatrix(record, whole)
    whole = packed[record.name.rpartition("[")[0]]
    parts = tuple(slice_record(part, expert) for part in whole.parts)
    if whole.is_transposed:
        record = replace(record, shape=record.shape[::-1])
    return ExpertMatrix(record, PackedTensor(record, parts))
