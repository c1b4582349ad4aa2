"""Tensors in a file without a name: it is gone with the process, however that ends.

For data that a process writes and reads again itself. Each tensor is mapped by itself and only
while it is used, so that only a small part of a large file is in the process's memory at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from offload.formats.mapped import LazyMapping, TensorShape


class UnnamedFile:
    """Tensors on storage, in a file without a name.

    Args:
        fill: writes every tensor's bytes, one tensor after the other.

    Raises:
        OSError: no space, no permission; nothing is left then, nor after an exception of `fill`.
    """

    def __init__(
        self,
        folder: Path,
        tensors: Sequence[TensorShape],
        fill: Callable[[Mapping[str, memoryview]], None],
    ) -> None:
        self._tensors = {tensor.name: tensor for tensor in tensors}
        self._offsets, self.n_bytes = _places(tensors)
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        try:
            os.posix_fallocate(self._file.fileno(), 0, self.n_bytes)  # a full disk: SIGBUS later
            fill(LazyMapping(self._tensors, self._mapped))
            os.fdatasync(self._file.fileno())
            self._forget_pages()
        except BaseException:
            self._file.close()
            raise

    @property
    def saved(self) -> Mapping[str, tuple[TensorShape, memoryview]]:
        """Tensors by name, each with its bytes; mapped again at every access."""
        return LazyMapping(self._tensors, lambda name: (self._tensors[name], self._mapped(name)))

    def close(self) -> None:
        """Free its disk space. Idempotent."""
        if not self._file.closed:
            self._forget_pages()
            self._file.close()

    def _mapped(self, name: str) -> memoryview:
        n_bytes = self._tensors[name].n_bytes
        if not n_bytes:
            return memoryview(bytearray())
        # Unmapped when the last reference to it is gone.
        return memoryview(mmap.mmap(self._file.fileno(), n_bytes, offset=self._offsets[name]))

    def _forget_pages(self) -> None:
        """Drop the file's pages from the page cache, which counts in a memory cgroup, too."""
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _places(tensors: Sequence[TensorShape]) -> tuple[dict[str, int], int]:
    """Return the offset of each tensor, where a mapping may begin, and the bytes of all."""
    offsets, end = {}, 0
    for tensor in tensors:
        offsets[tensor.name] = end
        end += -(-tensor.n_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
    return offsets, end
