"""One tensor of a model file, whatever the format, and the error of a file that is refused."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offload.errors import SpecdecError


class CheckpointError(SpecdecError):
    """The checkpoint is missing, incomplete, malformed or of a kind that is refused."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor on disk: `n_bytes` bytes from the absolute `offset` of the file `path`."""

    name: str
    dtype: str  # safetensors' name: "BF16", "F32", ...
    shape: tuple[int, ...]
    path: Path
    offset: int
    n_bytes: int
