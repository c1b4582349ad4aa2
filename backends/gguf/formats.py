"""The number formats of tensors that llama.cpp computes with: for others it ends the process."""

from __future__ import annotations

from collections.abc import Iterable

from offload.formats.gguf_index import GgufError
from offload.formats.tensors import TensorRecord

_NO_WEIGHTS = frozenset(("I8", "I16", "I32", "I64", "F64"))
_ADDED = "F32"
"""Of norms and biases, which are added to sums, or multiplied with them, in this format alone."""


def check_formats(records: Iterable[TensorRecord]) -> None:
    """Raise GgufError for numbers that no pass is computed with."""
    for record in records:
        is_added = len(record.shape) == 1 or record.name.endswith(".bias")
        if record.dtype in _NO_WEIGHTS or (is_added and record.dtype != _ADDED):
            wanted = f"it must be {_ADDED}" if is_added else "weights are floats, or quantised"
            raise GgufError(
                f"{record.path} has {record.name!r} in {record.dtype}, and {wanted}: the file is "
                "damaged, download it again"
            )
