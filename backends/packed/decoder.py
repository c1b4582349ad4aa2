"""Decoding of a module's packed tensors right before it computes, into a buffer that is reused.

The ring and resident layers have packed bytes; the buffer has the decoded tensors of one module. A
linear layer needs only a piece of its matrix at a time, since each output is a product with one
row. A piece stays in the processor's cache between its decoding and its product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate

import torch

from backends.packed.codec import CODECS, broken
from backends.packed.tensor import ROW_STEP, TORCH_TYPES, PackedTensor
from offload.storage.aligned import AlignedBuffer, buffer_bytes
from offload.units import MIB

PIECE_BYTES = 8 * MIB
"""Decoded size of a piece. 50 MB with 2 rows take 5.9 ms whole and 4.2 in pieces of 6 to 12 MiB
(bf16: 2.4), with 16 rows 7.2 and 5.3; a piece costs 0.2 ms (EPYC Zen 4, 2 cores, 32 MiB cache)."""
_ALIGNMENT = 64
_BLOCK_STEP = 8  # ROW_STEP rows of a multiple of 8 weights are whole blocks (docs/packed.md)


@dataclass(frozen=True)
class PackedModule:
    """The packed tensors of a module.

    in_pieces: it has one, a matrix that can be decoded and multiplied some rows at a time.
    """

    tensors: tuple[PackedTensor, ...]
    in_pieces: bool = False

    @property
    def capacity(self) -> int:
        """Bytes that the module needs in the buffer."""
        if self.in_pieces:
            return max(aligned_bytes(self.tensors[0], *rows) for rows in pieces(self.tensors[0]))
        return capacity_of(self.tensors)


def pieces(tensor: PackedTensor) -> list[tuple[int, int]]:
    """Return (start, end) of the rows that are decoded at a time."""
    num_rows, n_in = tensor.record.shape
    row_bytes = max(1, tensor.decoded_bytes // max(1, num_rows))
    step = max(1, num_rows)
    if n_in % _BLOCK_STEP == 0:
        step = max(1, PIECE_BYTES // row_bytes // ROW_STEP) * ROW_STEP
    return [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]


def decode_buffer_bytes(modules: Iterable[PackedModule]) -> int:
    """Return the memory for decoding these modules one after the other: the buffer and temporary
    memory; 0 without packed tensors."""
    listed = list(modules)
    n_bytes = max((module.capacity for module in listed), default=0)
    scratch = (CODECS[x.record.scheme].scratch_bytes(x) for m in listed for x in m.tensors)
    return buffer_bytes(n_bytes) + max(scratch) if n_bytes else 0


class Decoder:
    """The decode buffer and the threads that fill it; must be closed.

    Args:
        n_threads: number of decoding threads.
    """

    def __init__(self, modules: Iterable[PackedModule], n_threads: int) -> None:
        n_bytes = max((module.capacity for module in modules), default=0)
        self._buffer = AlignedBuffer(n_bytes) if n_bytes else None
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="specdec-decode")

    @property
    def n_bytes(self) -> int:
        """Size of the buffer."""
        return 0 if self._buffer is None else len(self._buffer.view)

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """Decode the tensors of one module; the result is valid until the next call.

        stored: the parts of each tensor as uint8 [n_bytes].

        Raises CheckpointError for bytes that are no packed tensor.
        """
        starts = accumulate((aligned_bytes(x) for x in tensors), initial=0)
        decoded = []
        for tensor, parts, start in zip(tensors, stored, starts, strict=False):
            num_rows = tensor.record.shape[0]
            (matrix,) = self._decode(tensor, parts, [(0, num_rows)], start)
            decoded.append(matrix.view(tensor.record.shape))
        return decoded

    def decode_pieces(
        self, tensor: PackedTensor, stored: Sequence[torch.Tensor]
    ) -> Iterator[torch.Tensor]:
        """Decode a matrix [n_out, n_in] in pieces of some rows, each valid until the next.

        Raises CheckpointError as `decode` does.
        """
        return self._decode(tensor, stored, pieces(tensor))

    def close(self) -> None:
        """Free the buffer and end the threads. Idempotent."""
        self._threads.shutdown()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _decode(
        self,
        tensor: PackedTensor,
        stored: Sequence[torch.Tensor],
        rows: Sequence[tuple[int, int]],
        offset: int = 0,
    ) -> Iterator[torch.Tensor]:
        """Decode each (start, end) of `rows` to [rows, weights of a row] at `offset`."""
        assert self._buffer is not None, "a decoder of no modules"
        record, n_in = tensor.record, tensor.row_weights
        try:
            decode_rows = CODECS[record.scheme].open(tensor, stored)
            for start, end in rows:
                n_bytes = tensor.decoded_bytes // max(1, record.shape[0]) * (end - start)
                view = self._buffer.view[offset : offset + n_bytes]
                raw = torch.frombuffer(view, dtype=torch.uint8)
                out = raw.view(TORCH_TYPES[record.dtype]).view(end - start, n_in)
                decode_rows(start, end, out, self._run)
                yield out
        except ValueError as error:
            raise broken(record, error) from error

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run tasks; all have ended when it returns, even after an error or Ctrl-C."""
        if len(work) == 1:
            work[0]()
            return
        futures = [self._threads.submit(task) for task in work]
        try:
            errors = [future.exception() for future in futures]
        finally:
            wait(futures)
        for error in errors:
            if error is not None:
                raise error


def capacity_of(tensors: Iterable[PackedTensor]) -> int:
    """Return the bytes of a module's packed tensors in the buffer."""
    return sum(aligned_bytes(tensor) for tensor in tensors)


def aligned_bytes(tensor: PackedTensor, start: int = 0, end: int | None = None) -> int:
    """Return the aligned, decoded bytes of rows start..end of a tensor."""
    num_rows = max(1, tensor.record.shape[0])
    n = (num_rows if end is None else end) - start
    return -(-tensor.decoded_bytes * n // num_rows // _ALIGNMENT) * _ALIGNMENT
