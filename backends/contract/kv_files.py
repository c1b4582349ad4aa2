"""The KV of sequences that are set aside, each in a file without a name (see UnnamedFile)."""

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
"""Of all files together, and never more than ..."""
_SHARE_OF_FREE = 0.5
"""... so much of what is free where they lie."""


class KvFile:
    """The KV of one text's prefix."""

    def __init__(
        self, files: KvFiles, token_ids: tuple[int, ...], file: UnnamedFile, n_mapped: int
    ) -> None:
        self._files, self._file = files, file
        self.token_ids, self.n_bytes = token_ids, file.n_bytes
        self._n_mapped = n_mapped

    def load(self, text: SequenceKV, n_growth_bytes: int = 0) -> bool:
        """Into an empty text; False, and it stays empty, where the file cannot be read.

        n_growth_bytes: that the KV cache may take for it.
        """
        if not self._files.free_memory(self._n_mapped + n_growth_bytes):
            return False
        try:
            text.load_prefix(self.token_ids, self._file.saved)
        except (OSError, BackendError):
            return False
        return True

    def close(self) -> None:
        """Idempotent."""
        self._files.let_go(self)
        self._file.close()


class KvFiles:
    """Writes them, as far as there is room.

    Args:
        find_folder: where they lie; None where they can lie nowhere. Asked with the first one.
        make_way: called with the bytes that one tensor is to be mapped in; whether they fit into
            the memory.
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

    @property
    def n_bytes(self) -> int:
        """Of all that there are."""
        return sum(item.n_bytes for item in self._open)

    def write(self, text: SequenceKV) -> KvFile | None:
        """The committed prefix of a text; None where there is no room for it, or no way."""
        if not self._backend.can_save_prefix or not text.n_committed:
            return None
        tensors = text.prefix_tensors()
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
            file = UnnamedFile(folder, tensors, text.save_prefix)
        except (OSError, BackendError):
            return None
        self._open.append(KvFile(self, tuple(text.committed_ids), file, n_mapped))
        return self._open[-1]

    def let_go(self, item: KvFile) -> None:
        """It is closed."""
        if item in self._open:
            self._open.remove(item)
