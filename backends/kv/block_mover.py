"""BlockMover: one block of all layers, from memory to the file and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from backends.kv.block_file import BlockFile
from backends.kv.layer import PoolLayer
from offload.storage.aligned import AlignedBuffer


class BlockMover:
    """Copies of hot blocks in a file; any thread may use it.

    layers: the layers that keep KV, by their number in the file.
    """

    def __init__(self, file: BlockFile, layers: Mapping[int, PoolLayer]) -> None:
        self._file, self._layers = file, layers

    @torch.inference_mode()
    def write(self, hot: int, cold: int) -> None:
        """Write a hot block of all layers. Raises StorageError."""
        with self._memory() as memory:
            for i, layer in self._layers.items():
                layer.write_block(hot, self._as_block(i, memory))
                self._file.write(i, cold, 1, memory)

    @torch.inference_mode()
    def read(self, cold: int, hot: int) -> None:
        """Read a block of all layers. Raises StorageError."""
        with self._memory() as memory:
            for i, layer in self._layers.items():
                self._file.read(i, cold, 1, memory)
                layer.read_block(hot, self._as_block(i, memory))

    @contextmanager
    def _memory(self) -> Iterator[memoryview]:
        """Yield memory for one block of a layer."""
        buffer = AlignedBuffer(self._file.max_block_bytes, is_huge=False)
        try:
            yield buffer.view
        finally:
            buffer.close()

    def _as_block(self, layer: int, memory: memoryview) -> torch.Tensor:
        n_bytes = self._file.block_bytes[layer]
        return torch.frombuffer(memory, dtype=torch.uint8, count=n_bytes).view(1, -1)
