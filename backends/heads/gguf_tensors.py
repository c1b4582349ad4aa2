"""Tensors of a GGUF file, decoded into memory: a small model that does not run on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from math import prod

import numpy as np
import torch

from backends.checkpoint.records import TORCH_DTYPES
from backends.contract.backend import UnsupportedModel
from offload.formats.gguf_header import row_bytes
from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord
from offload.units import MIB

_PIECE_NUMBERS = MIB
"""Numbers that are decoded at a time, which take 4 bytes each and more within the decoder."""
_ALIGNMENT = 64


def decoded_records(
    stored: Mapping[str, TensorRecord], dtype: torch.dtype
) -> dict[str, TensorRecord]:
    """Return the tensors as if the file had them in `dtype`, one after the other.

    Raises UnsupportedModel if they cannot be decoded here.
    """
    if find_spec("gguf") is None:
        raise UnsupportedModel("heads in GGUF files need gguf: pip install 'specdec[gguf]'")
    (name,) = (name for name, known in TORCH_DTYPES.items() if known == dtype)
    records, offset = {}, 0
    for key, record in stored.items():
        n_bytes = prod(record.shape) * dtype.itemsize
        records[key] = replace(record, name=key, dtype=name, offset=offset, n_bytes=n_bytes)
        offset += -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
    return records


def read_numbers(record: TensorRecord) -> torch.Tensor:
    """Return a tensor in float32. Raises CheckpointError, UnsupportedModel."""
    return decoded(record, torch.float32).view(record.shape)


def decoded(record: TensorRecord, dtype: torch.dtype) -> torch.Tensor:
    """Read a stored tensor and decode it: [rows, row length].

    Raises CheckpointError if the file ends within it or cannot be read, UnsupportedModel for a
    number format that the gguf package does not decode.
    """
    n_columns = record.shape[-1]
    result = torch.empty((prod(record.shape[:-1]), n_columns), dtype=dtype)
    done = 0
    for rows in _pieces(record):
        numbers = torch.from_numpy(np.ascontiguousarray(rows))
        result[done : done + len(numbers)] = numbers
        done += len(numbers)
    return result


def _pieces(record: TensorRecord) -> Iterator[np.ndarray]:
    """Yield some rows of a tensor at a time, in float32."""
    import gguf

    n_columns, num_rows = record.shape[-1], prod(record.shape[:-1])
    n_bytes, step = row_bytes(record.dtype, n_columns), max(1, _PIECE_NUMBERS // n_columns)
    for start in range(0, num_rows, step):
        end = min(start + step, num_rows)
        try:
            stored = read_part(
                record.path, record.offset + start * n_bytes, (end - start) * n_bytes
            )
        except OSError as error:
            raise CheckpointError(
                f"cannot read {record.path}: {error.strerror or error}"
            ) from error
        if len(stored) < (end - start) * n_bytes:
            raise CheckpointError(f"{record.path} ends within {record.name}: download it again")
        raw = np.frombuffer(bytearray(stored), dtype=np.uint8).reshape(-1, n_bytes)
        try:
            yield gguf.dequantize(raw, gguf.GGMLQuantizationType[record.dtype])
        except (NotImplementedError, KeyError) as error:
            raise UnsupportedModel(
                f"{record.path} has {record.name} in {record.dtype}, which the gguf package does "
                "not decode: take the head in another quantisation, or its safetensors"
            ) from error
