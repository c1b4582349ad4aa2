"""BlockFile: cold blocks of the KV cache in a file, by layer, then by number.

    layer 0   [ block 0 | block 1 | ... ]      a block: its keys [heads, BLOCK_SIZE, width], then
    layer 1   [ block 0 | block 1 | ... ]      its values, padded to ALIGNMENT

So a pass, which goes layer by layer, reads consecutive blocks of a layer with one call. The file is
sparse: it takes the space of what was written to it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from backends.attention.batch import BLOCK_SIZE
from offload.storage.aligned import align_up
from offload.storage.scratch_file import ScratchFile

PURPOSE = "the KV file"


def block_bytes(token_bytes: int) -> int:
    """Return the bytes of a block in the file, from those of a token's keys and values."""
    return align_up(BLOCK_SIZE * token_bytes)


class BlockFile:
    """Cold blocks of all layers that keep KV.

    Args:
        folder: of the file, which has no name.
        token_bytes: bytes of a token's keys and values together, for each of these layers.
        n_blocks: blocks of each layer.

    Raises:
        StorageError: the file cannot be made.
    """

    def __init__(self, folder: Path, token_bytes: Sequence[int], n_blocks: int) -> None:
        self.block_bytes = list(map(block_bytes, token_bytes))
        *self._starts, _ = accumulate((n_blocks * n for n in self.block_bytes), initial=0)
        self._file = ScratchFile(folder, PURPOSE)
        self._lock = threading.Lock()
        self._n_read = self._n_written = 0

    @property
    def max_block_bytes(self) -> int:
        return max(self.block_bytes)

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes read and bytes written so far."""
        with self._lock:
            return self._n_read, self._n_written

    def read(self, layer: int, first: int, n: int, memory: memoryview) -> None:
        """Fill `memory` with `n` blocks of a layer. Raises StorageError."""
        view, offset = self._part(layer, first, n, memory)
        self._file.read(view, offset)
        with self._lock:
            self._n_read += len(view)

    def write(self, layer: int, first: int, n: int, memory: memoryview) -> None:
        """Write `n` blocks of a layer from `memory`. Raises StorageError."""
        view, offset = self._part(layer, first, n, memory)
        self._file.write(view, offset)
        with self._lock:
            self._n_written += len(view)

    def close(self) -> None:
        self._file.close()

    def _part(self, layer: int, first: int, n: int, memory: memoryview) -> tuple[memoryview, int]:
        size = self.block_bytes[layer]
        return memory[: n * size], self._starts[layer] + first * size
