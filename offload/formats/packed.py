"""Packed tensors of a safetensors file, as described by its metadata (docs/packed.md).

A packed tensor is stored as bytes, U8 [n_bytes]. The metadata names its scheme, and the dtype and
shape after decoding; the meaning of the bytes is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload.formats.safetensors import (
    DTYPE_BITS,
    MAX_RANK,
    is_list_of_naturals,
    parse_json_object,
)
from offload.formats.tensors import CheckpointError, TensorRecord

METADATA_KEY = "specdec.packed"
VERSION = 1
_SCHEME = re.compile(r"[A-Z][A-Z0-9_]{0,39}")
_MAX_WEIGHTS = 2**48


def with_packed(
    path: Path, metadata: Mapping[str, str], records: Mapping[str, TensorRecord]
) -> dict[str, TensorRecord]:
    """Return the records of a file, with dtype and shape of packed tensors after decoding.

    Raises CheckpointError for malformed metadata.
    """
    text = metadata.get(METADATA_KEY)
    if text is None:
        return dict(records)
    table = parse_json_object(text.encode("utf-8", "surrogatepass"), path)
    version, tensors = table.get("version"), table.get("tensors")
    if version != VERSION or type(version) is not int:
        raise CheckpointError(
            f"{path} is packed in version {str(version)[:40]!r}, not {VERSION}: "
            "take a newer specdec, or pack the model again"
        )
    if not isinstance(tensors, dict):
        raise CheckpointError(f"{path}: its packed tensors are not listed; pack the model again")
    packed = {name: _packed(path, name, entry, records) for name, entry in tensors.items()}
    return {**records, **packed}


def _packed(path: Path, name: str, entry: Any, records: Mapping[str, TensorRecord]) -> TensorRecord:
    def refuse(reason: str) -> CheckpointError:
        return CheckpointError(
            f"{path}: packed tensor {name[:200]!r} {reason}; pack the model again"
        )

    record = records.get(name)
    if record is None:
        raise refuse("is not in the file")
    if record.dtype != "U8" or len(record.shape) != 1:
        raise refuse(f"is stored as {record.dtype}{list(record.shape)}, not as U8 [bytes]")
    if not isinstance(entry, dict) or set(entry) != {"scheme", "dtype", "shape"}:
        raise refuse("does not have exactly scheme, dtype and shape")
    scheme, dtype, shape = entry["scheme"], entry["dtype"], entry["shape"]
    if not isinstance(scheme, str) or not _SCHEME.fullmatch(scheme):
        raise refuse(f"has {str(scheme)[:40]!r} for a scheme")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not is_list_of_naturals(shape) or len(shape) > MAX_RANK:
        raise refuse("has a shape that is not a short list of non-negative integers")
    n_weights = 1
    for size in shape:
        n_weights *= size
    if n_weights > _MAX_WEIGHTS:
        raise refuse(f"has {n_weights} weights")
    return replace(record, dtype=dtype, shape=tuple(shape), scheme=scheme)
