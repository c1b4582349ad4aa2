"""Files for the KV of preempted sequences, each without a name (see UnnamedFile)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from backends.contract.backend import Backend, BackendError
from backends.contract.sequence import SequenceKV
from offload.formats.unnamed import UnnamedFile
from offload.process.temporary import temporary_folder
from offload.units import GIB

MAX_BYTES = 8 * GIB
"""Maximum bytes of all files together."""
_SHARE_OF_FREE = 0.5
"""Maximum share of the free space of the folder that they take."""


class KvFile:
    """A file with the KV of one sequence's committed prefix."""

    def __init__(
        self, files: KvFiles, token_ids: tuple[int, ...], file: UnnamedFile, n_mapped: int
    ) -> None:
        self._files, self._file = files, file
        self.token_ids, self.n_bytes = token_ids, file.n_bytes
        self._n_mapped = n_mapped

    def load(self, sequence: SequenceKV, n_growth_bytes: int = 0) -> bool:
        """Load the KV into an empty sequence; if that fails, return False and leave it empty.

        n_growth_bytes: memory that the KV cache may take for it.
        """
        if not self._files.free_memory(self._n_mapped + n_growth_bytes):
            return False
        try:
            sequence.load_prefix(self.token_ids, self._file.saved)
        except (OSError, BackendError):
            return False
        return True

    def close(self) -> None:
        """Close the file and free its space. Idempotent."""
        self._files.forget(self)
        self._file.close()


class KvFiles:
    """Writer of KV files, within a limit of disk space.

    Args:
        find_folder: return the folder for the files, or None if there is none.
        free_memory: return whether so many bytes of memory, to map a tensor in, can be had.
    """

    def __init__(
        self,
        backend: Backend,
        find_folder: Callable[[], Path | None] = temporary_folder,
        free_memory: Callable[[int], bool] = lambda n_bytes: True,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self._backend = backend
        self._find_folder, self.free_memory = find_folder, free_memory
        self._max_bytes = max_bytes
        self._open: list[KvFile] = []

    def use(self, backend: Backend, free_memory: Callable[[int], bool]) -> None:
        """Go on with another backend of the same model."""
        self._backend, self.free_memory = backend, free_memory

    @property
    def n_bytes(self) -> int:
        """Bytes of all open files."""
        return sum(file.n_bytes for file in self._open)

    def write(self, sequence: SequenceKV) -> KvFile | None:
        """Save the committed prefix of a sequence; return None if space or support is missing."""
        if not self._backend.can_save_prefix or not sequence.n_committed:
            return None
        tensors = sequence.prefix_tensors()
        folder = self._find_folder()
        n_mapped = max(tensor.n_bytes for tensor in tensors)
        if folder is None or not self.free_memory(n_mapped):
            return None
        try:
            free = _SHARE_OF_FREE * shutil.disk_usage(folder).free
            if sum(tensor.n_bytes for tensor in tensors) > min(
                free, self._max_bytes - self.n_bytes
            ):
                return None
            file = UnnamedFile(folder, tensors, sequence.save_prefix)
        except (OSError, BackendError):
            return None
        self._open.append(KvFile(self, tuple(sequence.committed_ids), file, n_mapped))
        return self._open[-1]

    def forget(self, file: KvFile) -> None:
        """Forget a closed file."""
        if file in self._open:
            self._open.remove(file)
