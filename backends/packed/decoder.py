"""Packed tensors of a module, decoded right before it computes, to where the next module's go.

The ring, and memory for layers that stay, hold packed bytes; a buffer holds what one module needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import torch

from backends.packed.codec import CODECS, broken
from backends.packed.tensor import TORCH_TYPES, PackedTensor
from offload.storage.aligned import AlignedBuffer, buffer_bytes

_ALIGNMENT = 64


def decode_buffer_bytes(modules: Iterable[Sequence[PackedTensor]]) -> int:
    """Memory that the packed tensors of each of these modules are decoded into, in turn, with what
    decoding takes beside; 0 where there are none."""
    listed = list(modules)
    n_bytes = max((room_of(tensors) for tensors in listed), default=0)
    beside = (CODECS[x.record.scheme].scratch_bytes(x) for tensors in listed for x in tensors)
    return buffer_bytes(n_bytes) + max(beside) if n_bytes else 0


class Decoder:
    """The buffer, and the threads that fill it; to be closed.

    Args:
        modules: the packed tensors of each.
        n_threads: that decode.
    """

    def __init__(self, modules: Iterable[Sequence[PackedTensor]], n_threads: int) -> None:
        n_bytes = max((room_of(tensors) for tensors in modules), default=0)
        self._buffer = AlignedBuffer(n_bytes) if n_bytes else None
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="specdec-decode")

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
        assert self._buffer is not None, "a decoder of no modules"
        starts = accumulate(map(aligned_bytes, tensors), initial=0)
        decoded = []
        for tensor, parts, start in zip(tensors, stored, starts, strict=False):
            view = self._buffer.view[start : start + tensor.decoded_bytes]
            raw = torch.frombuffer(view, dtype=torch.uint8)
            out = raw.view(TORCH_TYPES[tensor.record.dtype]).view(tensor.record.shape)
            try:
                CODECS[tensor.record.scheme].decode(tensor, parts, out, self._run)
            except ValueError as error:
                raise broken(tensor.record, error) from error
            decoded.append(out)
        return decoded

    def close(self) -> None:
        """Idempotent."""
        self._threads.shutdown()
        if self._buffer is not None:
            self._buffer.close()
            self._buffer = None

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """All of it is done at the end, also where some of it fails."""
        if len(work) == 1:
            work[0]()
            return
        futures = [self._threads.submit(piece) for piece in work]
        errors = [future.exception() for future in futures]
        for error in errors:
            if error is not None:
                raise error


def room_of(tensors: Iterable[PackedTensor]) -> int:
    """Of a module's packed tensors in the buffer."""
    return sum(map(aligned_bytes, tensors))


def aligned_bytes(tensor: PackedTensor) -> int:
    return -(-tensor.decoded_bytes // _ALIGNMENT) * _ALIGNMENT
