"""TraceWriter: append sequences to a folder of traces."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offload.units import MIB, format_bytes
from specdec.traces.format import (
    INDEX,
    Shard,
    TracedSequence,
    TraceError,
    TraceHeader,
    TraceIndex,
    read_index,
    write_index,
)
from specdec.traces.top_k import TopK

SHARD_BYTES = 8 * MIB
"""Size from which a shard is written; what is not written yet is lost with a killed process."""
_LOCK = ".lock"
_MAX_HEADER_BYTES = 1024
"""Maximum size of a shard's header: it has seven tensors."""
_DTYPES = {"int32": "I32", "float16": "F16"}
_BFLOAT16 = "BF16"


class TraceWriter:
    """Writer of a folder's traces, the only one at a time; only their owner can read the files.

    Args:
        max_bytes: limit of the folder's shards, those that were there included; None: no limit.

    Attributes:
        is_full: whether a sequence was refused because of the limit.

    Raises:
        TraceError: the folder cannot be written, another process writes to it, or it has traces
            with another header.
    """

    def __init__(
        self,
        folder: Path,
        header: TraceHeader,
        max_bytes: int | None = None,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        self.folder, self._max_bytes, self._shard_bytes = folder, max_bytes, shard_bytes
        self.is_full = False
        self._buffer: list[TracedSequence] = []
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not (folder / INDEX).exists() and _has_foreign_files(folder):
                raise TraceError(
                    f"{folder} has other files than traces: name a new folder, or an empty one"
                )
            self._lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
            try:
                self._take_lock()
                self.index = self._opened(header)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise _cannot_write(folder, error) from error

    def _take_lock(self) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TraceError(
                f"another process writes traces to {self.folder}: name another folder"
            ) from None

    def _opened(self, header: TraceHeader) -> TraceIndex:
        """Return the folder's index; a new one is written, so that later errors come now."""
        if not (self.folder / INDEX).exists():
            index = TraceIndex(header)
            write_index(self.folder, index)
            return index
        index = read_index(self.folder)
        if index.header != header:
            part = "model" if index.header.target != header.target else "kind"
            raise TraceError(
                f"{self.folder} has traces of another {part}: name another folder, or remove it"
            )
        return index

    @property
    def n_sequences(self) -> int:
        return self.index.n_sequences + len(self._buffer)

    @property
    def _buffered_bytes(self) -> int:
        return sum(sequence.n_bytes for sequence in self._buffer)

    def add(self, sequence: TracedSequence) -> bool:
        """Append a sequence; return False if it would exceed the limit. Raises TraceError."""
        n_bytes = self._buffered_bytes + sequence.n_bytes
        n_files = self.index.n_bytes + n_bytes + _MAX_HEADER_BYTES
        if self._max_bytes is not None and n_files > self._max_bytes:
            self.is_full = True
            return False
        self._buffer.append(sequence)
        if n_bytes >= self._shard_bytes:
            self.flush()
        return True

    def flush(self) -> None:
        """Write what is buffered. Raises TraceError, and drops it."""
        sequences, self._buffer = self._buffer, []
        if not sequences:
            return
        name = f"traces-{len(self.index.shards):05d}.safetensors"
        partial = self.folder / f".{name}.partial"
        tensors = _tensors(sequences, self.index.header)
        n_tokens = len(tensors["token_ids"])
        try:
            _write_safetensors(partial, tensors)
            shard = Shard(name, len(sequences), n_tokens, partial.stat().st_size)
            partial.replace(self.folder / name)
            self.index = replace(self.index, shards=(*self.index.shards, shard))
            write_index(self.folder, self.index)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise _cannot_write(self.folder, error) from error

    def close(self) -> None:
        """Write what is buffered, and let other processes write. Raises TraceError."""
        try:
            self.flush()
        finally:
            os.close(self._lock)

    def describe_limit(self) -> str:
        assert self._max_bytes is not None, "a folder without a limit is never full"
        return f"{self.folder} has reached its limit of {format_bytes(self._max_bytes)}"


def _has_foreign_files(folder: Path) -> bool:
    return any(not path.name.startswith((".", "traces-")) for path in folder.iterdir())


def _cannot_write(folder: Path, error: OSError) -> TraceError:
    reason = error.strerror or str(error)
    return TraceError(f"cannot write traces to {folder}: {reason}: free space, or name another")


def _tensors(sequences: list[TracedSequence], header: TraceHeader) -> dict[str, NDArray[Any]]:
    lengths = [len(sequence.token_ids) for sequence in sequences]
    starts = np.cumsum([0, *lengths[:-1]])
    top = TopK.joined([sequence.top for sequence in sequences], header.top_k)
    tensors: dict[str, NDArray[Any]] = {
        "lengths": np.asarray(lengths, dtype=np.int32),
        "token_ids": _joined(sequence.token_ids for sequence in sequences),
        "rows": _joined(
            sequence.rows + start for sequence, start in zip(sequences, starts, strict=True)
        ),
        "top_ids": top.ids,
        "top_logprobs": top.logprobs,
        "rest_logprob": top.rest,
    }
    if header.hidden_layers:
        states = [s.hidden_states for s in sequences if s.hidden_states is not None]
        tensors["hidden_states"] = _bfloat16(np.concatenate(states))
    return tensors


def _joined(parts: Iterable[NDArray[Any]]) -> NDArray[np.int32]:
    return np.concatenate(list(parts)).astype(np.int32)


def _bfloat16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of values rounded to bfloat16, to the even one of two equally near."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded >> 16).astype(np.uint16)


def _write_safetensors(path: Path, tensors: dict[str, NDArray[Any]]) -> None:
    """Write a file for its owner alone: the size of the header, the header in JSON, the data."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        dtype = _BFLOAT16 if name == "hidden_states" else _DTYPES[str(tensor.dtype)]
        header[name] = {"dtype": dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors.values():
            file.write(np.ascontiguousarray(tensor).tobytes())
