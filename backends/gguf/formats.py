"""Check of tensor number formats: llama.cpp ends the process on formats it cannot compute with."""

from __future__ import annotations

from collections.abc import Iterable

from offload.formats.gguf_index import GgufError
from offload.formats.tensors import TensorRecord

_NO_WEIGHTS = frozenset(("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"))
"""Formats that are never those of weights; the last two are formats of activations."""
_VECTOR_FORMAT = "F32"
"""Format of norms and biases: llama.cpp adds and multiplies them in this format only."""


def check_formats(records: Iterable[TensorRecord]) -> None:
    """Raise GgufError for number formats that no pass can compute with."""
    for record in records:
        is_vector = len(record.shape) == 1 or record.name.endswith((".bias", "_norm.weight"))
        if record.dtype in _NO_WEIGHTS or (is_vector and record.dtype != _VECTOR_FORMAT):
            expected = "weights are floats or in a format of weights"
            if is_vector:
                expected = f"norms and biases are {_VECTOR_FORMAT}"
            raise GgufError(
                f"{record.path} has {record.name!r} in {record.dtype}, and {expected}: it is "
                "damaged (download it again), or was not made by llama.cpp's converter (convert "
                "it again)"
            )
