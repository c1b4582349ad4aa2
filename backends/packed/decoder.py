"""Packed tensors of a module, decoded right before it computes, to where the next module's go.

The ring, and memory for layers that stay, hold packed bytes; a buffer holds what one module needs.
A linear layer needs some rows of its matrix at a time, for each of its outputs is a product with
one of them. So each thread decodes rows of its own and multiplies with them at once, while they are
in its cache, and no thread waits for another before the layer is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from threading import Barrier

import torch

from backends.packed.codec import CODECS, broken
from backends.packed.tensor import ROW_STEP, TORCH_TYPES, DecodeRows, PackedTensor
from offload.storage.aligned import AlignedBuffer, buffer_bytes
from offload.units import MIB

PIECE_BYTES = 3 * MIB
"""Decoded by a thread at a time. 50 MB with 2 rows: 4.5 ms in pieces of 1.5 MiB, 3.4 of 3 and of 6,
and 3.6 for bf16 that is not packed, all beside other work; idle 5.9 where all threads decode the
matrix before all of them multiply with it, and 2.4 for bf16 (EPYC Zen 4, 2 cores)."""
UsePiece = Callable[[int, int, torch.Tensor], None]
"""(start, end, weight): computes with these rows of a matrix, [end - start, n_in], which are
valid until it returns. Several threads call it at the same time."""
_ALIGNMENT = 64
_BLOCK_STEP = 8  # weights of a row that ROW_STEP rows make whole blocks of (docs/packed.md)


@dataclass(frozen=True)
class PackedModule:
    """The packed tensors of a module.

    in_pieces: it has one, a matrix whose rows can be decoded and multiplied with some at a time.
    """

    tensors: tuple[PackedTensor, ...]
    in_pieces: bool = False

    def room(self, n_threads: int) -> int:
        """Bytes in the buffer."""
        if not self.in_pieces:
            return room_of(self.tensors)
        return sum(_largest(self.tensors[0], part) for part in shares(self.tensors[0], n_threads))


Rows = tuple[int, int]
"""(start, end)"""


def shares(tensor: PackedTensor, n_threads: int) -> list[list[Rows]]:
    """For each thread the rows of a matrix that it decodes at a time."""
    n_rows, n_in = tensor.record.shape
    if n_in % _BLOCK_STEP:
        return [[(0, n_rows)]]
    row_bytes = max(1, tensor.decoded_bytes // max(1, n_rows))
    step = max(1, PIECE_BYTES // row_bytes // ROW_STEP) * ROW_STEP
    n_steps = -(-n_rows // ROW_STEP)
    ends = [min(n_rows, ROW_STEP * (n_steps * i // n_threads)) for i in range(1, n_threads + 1)]
    found = [
        [(first, min(first + step, end)) for first in range(start, end, step)]
        for start, end in zip([0, *ends], [*ends[:-1], n_rows], strict=False)
    ]
    return [rows for rows in found if rows]


def _largest(tensor: PackedTensor, rows: Iterable[Rows]) -> int:
    return max(aligned_bytes(tensor, end - start) for start, end in rows)


def decode_buffer_bytes(modules: Iterable[PackedModule], n_threads: int) -> int:
    """Memory that the packed tensors of each of these modules are decoded into, in turn, with what
    decoding takes beside; 0 where there are none."""
    listed = list(modules)
    n_bytes = max((module.room(n_threads) for module in listed), default=0)
    beside = (CODECS[x.record.scheme].scratch_bytes(x) for one in listed for x in one.tensors)
    return buffer_bytes(n_bytes) + n_threads * max(beside) if n_bytes else 0


class Decoder:
    """The buffer, and the threads that fill it; to be closed.

    Args:
        n_threads: that decode.
    """

    def __init__(self, modules: Iterable[PackedModule], n_threads: int) -> None:
        n_bytes = max((module.room(n_threads) for module in modules), default=0)
        self._buffer = AlignedBuffer(n_bytes) if n_bytes else None
        self._n_threads = n_threads
        self._threads = start_single_threads(n_threads, "specdec-decode") if n_bytes else None

    @property
    def n_bytes(self) -> int:
        """Memory of the buffer."""
        return 0 if self._buffer is None else len(self._buffer.view)

    def decode(
        self, tensors: Sequence[PackedTensor], stored: Sequence[Sequence[torch.Tensor]]
    ) -> list[torch.Tensor]:
        """The tensors of one module, valid until the next call.

        stored: of each, its parts as uint8 [n_bytes].

        Raises CheckpointError for bytes that are no packed tensor.
        """
        starts = accumulate(map(aligned_bytes, tensors), initial=0)
        decoded = []
        for tensor, parts, start in zip(tensors, stored, starts, strict=False):
            out = self._piece(tensor, tensor.record.shape[0], start)
            try:
                self._open(tensor, parts)(0, len(out), out, self._run)
            except ValueError as error:
                raise broken(tensor.record, error) from error
            decoded.append(out.view(tensor.record.shape))
        return decoded

    def each_piece(
        self, tensor: PackedTensor, stored: Sequence[torch.Tensor], use: UsePiece
    ) -> None:
        """Call `use` with all rows of a matrix [n_out, n_in], some at a time.

        Raises CheckpointError as `decode` does.
        """
        place, work = 0, []
        try:
            decode = self._open(tensor, stored)
            for rows in shares(tensor, self._n_threads):
                work.append(partial(self._use_share, tensor, decode, rows, place, use))
                place += _largest(tensor, rows)
            self._run(work)
        except ValueError as error:
            raise broken(tensor.record, error) from error

    def close(self) -> None:
        """Idempotent."""
        if self._threads is not None:
            self._threads.shutdown()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _open(self, tensor: PackedTensor, stored: Sequence[torch.Tensor]) -> DecodeRows:
        return CODECS[tensor.record.scheme].open(tensor, stored)

    def _use_share(
        self,
        tensor: PackedTensor,
        decode: DecodeRows,
        rows: Sequence[Rows],
        place: int,
        use: UsePiece,
    ) -> None:
        with torch.inference_mode():  # a thread's own
            for start, end in rows:
                out = self._piece(tensor, end - start, place)
                decode(start, end, out, _run_here)
                use(start, end, out)

    def _piece(self, tensor: PackedTensor, n_rows: int, place: int) -> torch.Tensor:
        """[rows, weights of a row] at `place` in the buffer."""
        assert self._buffer is not None, "a decoder of no modules"
        n_bytes = tensor.decoded_bytes // max(1, tensor.record.shape[0]) * n_rows
        raw = torch.frombuffer(self._buffer.view[place : place + n_bytes], dtype=torch.uint8)
        return raw.view(TORCH_TYPES[tensor.record.dtype]).view(n_rows, tensor.row_weights)

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """All of it is done at the end, also where some of it fails."""
        assert self._threads is not None, "a decoder of no modules"
        futures = [self._threads.submit(piece) for piece in work]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error


def start_single_threads(n_threads: int, name: str) -> ThreadPoolExecutor:
    """Threads in each of which torch computes alone, where it divides work among threads else."""
    n_before, started = torch.get_num_threads(), Barrier(n_threads + 1)

    def start() -> None:
        torch.get_num_threads()  # a thread takes the number of all when it is first asked
        torch.set_num_threads(1)
        started.wait()

    pool = ThreadPoolExecutor(n_threads, thread_name_prefix=name)
    for _ in range(n_threads):
        pool.submit(start)
    started.wait()
    torch.set_num_threads(n_before)  # of this thread, and of those that are yet to compute
    return pool


def _run_here(work: Sequence[Callable[[], None]]) -> None:
    for piece in work:
        piece()


def room_of(tensors: Iterable[PackedTensor]) -> int:
    """Of a module's packed tensors in the buffer."""
    return sum(aligned_bytes(tensor) for tensor in tensors)


def aligned_bytes(tensor: PackedTensor, n_rows: int | None = None) -> int:
    """Of so many of its rows."""
    all_rows = max(1, tensor.record.shape[0])
    n_bytes = tensor.decoded_bytes // all_rows * (all_rows if n_rows is None else n_rows)
    return -(-n_bytes // _ALIGNMENT) * _ALIGNMENT
