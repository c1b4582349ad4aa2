"""Packed tensors of decoder layers, decoded into one buffer right before their use.

A buffer holds the layer that is computed. The ring, and memory for layers that stay, hold packed
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import accumulate

import numpy as np

from backends.packed.codec import CODECS, broken, decoded_bytes
from offload.formats.tensors import TensorRecord
from offload.storage.aligned import AlignedBuffer, buffer_bytes

_ALIGNMENT = 64


def decode_buffer_bytes(records: Iterable[TensorRecord]) -> int:
    """Memory that the packed tensors of a layer are decoded into; 0 where there are none."""
    n_bytes = sum(_aligned(r) for r in records if r.scheme)
    return buffer_bytes(n_bytes) if n_bytes else 0


class LayerDecoder:
    """The buffer, and the threads that fill it; to be closed.

    Args:
        layers: their tensors, packed or not.
        n_threads: that decode.
    """

    def __init__(self, layers: Sequence[Sequence[TensorRecord]], n_threads: int) -> None:
        self._packed = [tuple(r for r in layer if r.scheme) for layer in layers]
        n_bytes = max((sum(map(_aligned, layer)) for layer in self._packed), default=0)
        self._buffer = AlignedBuffer(n_bytes) if n_bytes else None
        self._threads = ThreadPoolExecutor(n_threads, thread_name_prefix="specdec-decode")

    @property
    def n_bytes(self) -> int:
        """Memory of the buffer."""
        return 0 if self._buffer is None else len(self._buffer.view)

    def decodes(self, index: int) -> bool:
        """Whether there is anything packed in this layer."""
        return bool(self._packed[index])

    def decode(self, index: int, stored: Mapping[str, memoryview]) -> dict[str, memoryview]:
        """The decoded bytes of the packed tensors of a layer, valid until the next call.

        Raises CheckpointError for bytes that are no packed tensor.
        """
        records = self._packed[index]
        if self._buffer is None or not records:
            return {}
        starts = accumulate(map(_aligned, records), initial=0)
        decoded = {
            record.name: self._buffer.view[start : start + decoded_bytes(record)]
            for record, start in zip(records, starts, strict=False)
        }
        work = [
            piece
            for record in records
            for piece in _pieces(record, _as_array(stored[record.name]), decoded[record.name])
        ]
        self._run(work)
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


def _pieces(
    record: TensorRecord, stored: np.ndarray, decoded: memoryview
) -> list[Callable[[], None]]:
    """What fills `decoded`, in parts."""
    out = _as_array(decoded)
    codec = CODECS[record.scheme]
    n_weights = math.prod(record.shape)
    try:
        decode = codec.opened(stored, n_weights)
    except ValueError as error:
        raise broken(record, error) from error
    parts = (
        (start, min(start + codec.piece_weights, n_weights))
        for start in range(0, n_weights, codec.piece_weights)
    )
    return [
        partial(decode, start, end, out[start * codec.itemsize : end * codec.itemsize])
        for start, end in parts
    ]


def _as_array(view: memoryview) -> np.ndarray:
    return np.frombuffer(view, np.uint8)


def _aligned(record: TensorRecord) -> int:
    return -(-decoded_bytes(record) // _ALIGNMENT) * _ALIGNMENT
