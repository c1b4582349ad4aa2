"""The tensors of a model's files, whatever the format, and the error of a file that is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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


class TensorIndex(Mapping[str, TensorRecord]):
    """All tensors of one model by name."""

    def __init__(self, records: Mapping[str, TensorRecord]) -> None:
        self._records = dict(records)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, headers and padding excluded."""
        return sum(record.n_bytes for record in self._records.values())

    def __getitem__(self, name: str) -> TensorRecord:
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)
