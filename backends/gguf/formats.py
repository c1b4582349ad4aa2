"""The number formats of tensors that llama.cpp computes with: at others it ends the process."""

from __future__ import annotations

from collections.abc import Iterable

from offload.formats.gguf_index import GgufError
from offload.formats.tensors import TensorRecord

_NO_WEIGHTS = frozenset(("I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"))
"""The last two are what activations are converted to; nothing converts weights to them."""
_OF_VECTORS = "F32"
"""Of norms and biases: sums are in this format, and nothing else is added to them or multiplied."""


def check_formats(records: Iterable[TensorRecord]) -> None:
    """Raise GgufError for numbers that no pass is computed with."""
    for record in records:
        is_vector = len(record.shape) == 1 or record.name.endswith((".bias", "_norm.weight"))
        if record.dtype in _NO_WEIGHTS or (is_vector and record.dtype != _OF_VECTORS):
            rest = "weights are floats or in a format of weights"
            requested = f"norms and biases are {_OF_VECTORS}" if is_vector else rest
            raise GgufError(
                f"{record.path} has {record.name!r} in {record.dtype}, and {requested}: it is damaged "
                "(download it again), or was not made by llama.cpp's converter (convert it again)"
            )
