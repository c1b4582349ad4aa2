"""The tensors of a model's files, in any format, and the error for a file that is refused."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from offload.errors import SpecdecError


class CheckpointError(SpecdecError):
    """The checkpoint is missing, incomplete, malformed or of a kind that is refused."""


@dataclass(frozen=True)
class TensorRecord:
    """One tensor on disk: `n_bytes` bytes from the absolute `offset` of the file `path`."""

    name: str
    dtype: str  # safetensors' name: "BF16", "F32", ..., or ggml's
    shape: tuple[int, ...]
    path: Path
    offset: int
    n_bytes: int
    scheme: str = ""
    """Packing scheme of the bytes (docs/packed.md); empty if they are the numbers themselves."""


class FileState(NamedTuple):
    """Identity of a file and of its content, to notice changes."""

    device: int
    inode: int
    n_bytes: int
    modified_ns: int

    @classmethod
    def of(cls, status: os.stat_result) -> FileState:
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def file_state(path: Path) -> FileState:
    """Return the state of a file. Raises CheckpointError if it does not exist."""
    try:
        return FileState.of(path.stat())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error


class TensorIndex(Mapping[str, TensorRecord]):
    """All tensors of one model by name.

    Args:
        states: states of the files, from before their headers were read.
    """

    def __init__(
        self, records: Mapping[str, TensorRecord], states: Mapping[Path, FileState]
    ) -> None:
        self._records = dict(records)
        self._states = dict(states)

    def check_unchanged(self) -> None:
        """Raise CheckpointError if a path leads to another file than when it was indexed.

        Otherwise all files opened meanwhile are those that the index describes.
        """
        for path, state in self._states.items():
            if file_state(path) != state:
                raise CheckpointError(
                    f"{path} was changed or replaced since its header was read; "
                    "load the model again"
                )

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
