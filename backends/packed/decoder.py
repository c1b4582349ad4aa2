"""Products with packed tensors, and decoding of whole ones, on all threads.

The ring and resident layers have packed bytes. A linear layer's matrix is decoded tile by tile and
multiplied while a tile is in the processor's cache (backends/tiles/products.py): it is never whole
in memory. The tensors of other modules are decoded into a buffer right before their module runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate

import torch

from backends.packed.codec import CODECS, broken
from backends.packed.kernels import tile_products
from backends.packed.tensor import TORCH_TYPES, PackedTensor
from offload.storage.aligned import AlignedBuffer, buffer_bytes
from offload.units import KIB

_ALIGNMENT = 64
WORKSPACE_BYTES = 576 * KIB + 128 * 4 * KIB + 112 * KIB
"""Memory of a thread: a tile, the partial sums of MAX_TOKENS tokens, and the decoder's own."""
_PART_ROWS = 64
_PARTS_PER_THREAD = 4
"""Parts of a matrix per thread: another program may take a processor away from one thread."""
_SMALL_MATRIX = 1 << 18
"""Weights below which a second thread costs as much as it saves."""


@dataclass(frozen=True)
class PackedModule:
    """The packed tensors of a module.

    is_multiplied: it has one, a matrix that rows are multiplied with, and nothing else is done.
    """

    tensors: tuple[PackedTensor, ...]
    is_multiplied: bool = False

    @property
    def capacity(self) -> int:
        """Bytes that the module needs in the buffer of whole tensors."""
        return 0 if self.is_multiplied else capacity_of(self.tensors)


def decode_buffer_bytes(modules: Iterable[PackedModule], n_threads: int) -> int:
    """Return the memory for computing these modules one after the other: the buffer, the threads'
    workspaces and temporary memory; 0 without packed tensors."""
    listed = list(modules)
    if not listed:
        return 0
    n_bytes = max(module.capacity for module in listed)
    scratch = (CODECS[x.record.scheme].scratch_bytes(x) for m in listed for x in m.tensors)
    buffers = buffer_bytes(n_bytes) if n_bytes else 0
    return buffers + n_threads * buffer_bytes(WORKSPACE_BYTES) + max(scratch)


class Decoder:
    """The threads that decode and multiply, and their memory; must be closed."""

    def __init__(self, modules: Iterable[PackedModule], n_threads: int) -> None:
        listed = list(modules)
        n_bytes = max((module.capacity for module in listed), default=0)
        self._buffer = AlignedBuffer(n_bytes) if n_bytes else None
        self._workspaces = [AlignedBuffer(WORKSPACE_BYTES) for _ in range(n_threads) if listed]
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="specdec-decode")

    @property
    def n_bytes(self) -> int:
        """Size of the buffer and the workspaces."""
        buffers = self._workspaces + ([] if self._buffer is None else [self._buffer])
        return sum(len(buffer.view) for buffer in buffers)

    def multiply(
        self,
        tensor: PackedTensor,
        stored: Sequence[torch.Tensor],
        x: torch.Tensor,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return x [..., n_in] times a matrix [n_out, n_in], plus `bias`, as a linear layer does.

        The decoded weights have the dtype of x. Sums are in float32, in an order of their own
        (backends/tiles/products.py): so the bits of a row do not depend on other rows.

        stored: the parts of the tensor as uint8 [n_bytes].

        Raises CheckpointError for bytes that are no packed tensor.
        """
        products = tile_products()
        n_out, n_in = tensor.record.shape
        rows = x.reshape(-1, n_in)
        written = products.MULTIPLIED[x.dtype]
        try:
            table = CODECS[tensor.record.scheme].table(tensor, stored, written)
        except ValueError as error:
            raise broken(tensor.record, error) from error
        sums = torch.empty(-(-len(rows) // 4) * 4, n_out, dtype=torch.float32)
        for start in range(0, len(rows), products.MAX_TOKENS):
            some = products.padded(rows[start : start + products.MAX_TOKENS])
            out = sums[start:].data_ptr()

            def work(part: tuple[int, int], workspace: int) -> None:
                products.multiply(table, written, n_in, part, some, out, n_out, workspace)  # noqa: B023

            self._in_parts(n_out, n_in, work)
        if table.has_error:
            raise broken(tensor.record, ValueError("an exception has a code, too"))
        sums = sums[: len(rows)]
        if bias is not None:
            sums += bias
        return sums.to(x.dtype).view(*x.shape[:-1], n_out)

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Decode the tensors of one module; the result is valid until the next call.

        stored: the parts of each tensor as uint8 [n_bytes].

        Raises CheckpointError for bytes that are no packed tensor.
        """
        starts = accumulate((aligned_bytes(x) for x in tensors), initial=0)
        return [
            self._decode(tensor, parts, start)
            for tensor, parts, start in zip(tensors, stored, starts, strict=False)
        ]

    def close(self) -> None:
        """Free the memory and end the threads. Idempotent."""
        self._threads.shutdown()
        for buffer in self._workspaces:
            buffer.close()
        self._workspaces = []
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _decode(
        self, tensor: PackedTensor, stored: Sequence[torch.Tensor], offset: int
    ) -> torch.Tensor:
        assert self._buffer is not None, "a decoder of no modules"
        products, record = tile_products(), tensor.record
        written = products.WRITTEN[record.dtype]
        try:
            table = CODECS[record.scheme].table(tensor, stored, written)
        except ValueError as error:
            raise broken(record, error) from error
        raw = torch.frombuffer(
            self._buffer.view[offset : offset + tensor.decoded_bytes], dtype=torch.uint8
        )
        out = raw.view(TORCH_TYPES[record.dtype]).view(record.shape)

        def work(part: tuple[int, int], workspace: int) -> None:
            products.decode(table, part, tensor.row_weights, out, workspace)

        self._in_parts(record.shape[0], tensor.row_weights, work)
        if table.has_error:
            raise broken(record, ValueError("an exception has a code, too"))
        return out

    def _in_parts(
        self, num_rows: int, row_weights: int, work: Callable[[tuple[int, int], int], None]
    ) -> None:
        """Call work(part, address of a workspace) for parts of rows, on the threads of a pass."""
        assert self._workspaces, "a decoder of no modules"
        n_threads = min(len(self._workspaces), torch.get_num_threads())
        if num_rows * row_weights < _SMALL_MATRIX:
            n_threads = 1
        n_parts = n_threads * _PARTS_PER_THREAD if n_threads > 1 else 1
        size = max(1, -(-num_rows // n_parts // _PART_ROWS)) * _PART_ROWS
        left = iter([(i, min(i + size, num_rows)) for i in range(0, num_rows, size)])

        def work_on(buffer: AlignedBuffer) -> None:
            address = torch.frombuffer(buffer.view, dtype=torch.uint8).data_ptr()
            for part in left:
                work(part, address)

        tasks = [lambda own=buffer: work_on(own) for buffer in self._workspaces[:n_threads]]
        self._run(tasks)

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run tasks, the first in this thread; all have ended when it returns, even after an error
        or Ctrl-C."""
        first, *remaining = work
        futures = [self._threads.submit(task) for task in remaining]
        try:
            first()
            errors = [future.exception() for future in futures]
        finally:
            wait(futures)
        for error in errors:
            if error is not None:
                raise error


def capacity_of(tensors: Iterable[PackedTensor]) -> int:
    """Return the bytes of a module's packed tensors in the buffer."""
    return sum(aligned_bytes(tensor) for tensor in tensors)


def aligned_bytes(tensor: PackedTensor) -> int:
    """Return the aligned, decoded bytes of a tensor."""
    return -(-tensor.decoded_bytes // _ALIGNMENT) * _ALIGNMENT
