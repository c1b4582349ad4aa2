"""A model's fingerprint from its tensors: the same for a copy, different for a fine-tune."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from offload.formats.part import read_part
from offload.formats.tensors import CheckpointError, TensorRecord

SAMPLE_BYTES = 4096
"""Bytes read of every tensor: fine-tunes of one model differ only in the weights' values."""


def fingerprint(records: Iterable[TensorRecord], description: str) -> str:
    """Return the SHA-256 (hex) of names, dtypes, shapes, each tensor's sample and `description`.

    File times and the distribution of tensors over files do not matter.

    Raises:
        CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256(description.encode())
    for record in sorted(records, key=lambda record: record.name):
        form = record.scheme or record.dtype
        digest.update(f"\n{record.name!r} {form} {record.shape}\n".encode())
        digest.update(_middle(record))
    return digest.hexdigest()


def _middle(record: TensorRecord) -> bytes:
    n_bytes = min(SAMPLE_BYTES, record.n_bytes)
    try:
        return read_part(record.path, record.offset + (record.n_bytes - n_bytes) // 2, n_bytes)
    except OSError as error:
        raise CheckpointError(f"cannot read {record.path}: {error.strerror or error}") from error
