"""Weights of a safetensors checkpoint as float32 arrays, without torch."""

from __future__ import annotations

import math

import numpy as np

from offload.formats.tensors import CheckpointError, TensorRecord


def read_float32(record: TensorRecord, rows: range | None = None) -> np.ndarray:
    """Return one tensor, float32 in its own shape; BF16 and F16 are widened exactly.

    Args:
        record: the tensor.
        rows: consecutive rows (of its first dimension); None: all.

    Raises:
        CheckpointError: the type is another one, or the file is too short.
    """
    if record.scheme:
        raise CheckpointError(
            f"{record.path} stores {record.name} packed as {record.scheme}: name the checkpoint "
            "that was packed"
        )
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}.get(record.dtype)
    if kind is None:
        raise CheckpointError(
            f"{record.path} stores {record.name} as {record.dtype}; BF16, F16 and F32 are read"
        )
    shape, offset = record.shape, record.offset
    if rows is not None:
        offset += rows.start * (record.n_bytes // shape[0])
        shape = (len(rows), *shape[1:])
    n_weights = math.prod(shape)
    raw = np.fromfile(record.path, dtype=kind, count=n_weights, offset=offset)
    if raw.size != n_weights:
        raise CheckpointError(f"{record.path} ends within {record.name}; download it again")
    if record.dtype == "BF16":  # the upper half of a float32
        return (raw.astype(np.uint32) << 16).view(np.float32).reshape(shape)
    return raw.astype(np.float32, copy=False).reshape(shape)
