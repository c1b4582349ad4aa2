"""The KV of a committed prefix in llama.cpp's own format: one sequence's cells, as bytes.

The format depends on the version of llama.cpp, which must be stored with it. Counts and sizes are
checked here before llama.cpp reads it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from backends.contract.backend import BackendError
from backends.contract.sequence import SavedTensors
from backends.ggml.library import LlamaModel
from backends.llama.context import LlamaContext
from backends.llama_states.store import RecurrentStore
from offload.formats.mapped import TensorShape

_NAME, _BASE = "sequence", "base"
_HEAD_BYTES = 8  # magic and version
_CELL_BYTES = (12, 20)  # position, number of sequences (1), sequence; with M-RoPE also x and y
_MAX_LAYERS = 10_000


class SequenceState:
    """Saves and loads the cells of one sequence as bytes, in their order in the cache."""

    def __init__(self, model: LlamaModel, context: LlamaContext) -> None:
        self._library, self._context = model.library, context

    def n_bytes(self, sequence: int) -> int:
        n_bytes: int = self._library.llama_state_seq_get_size(self._context.handle, sequence)
        return n_bytes

    def get(self, buffer: memoryview, sequence: int) -> None:
        n_written = self._library.llama_state_seq_get_data(
            self._context.handle, _pointer(buffer), len(buffer), sequence
        )
        if n_written != len(buffer):
            raise BackendError(
                f"llama.cpp wrote {n_written} of {len(buffer)} bytes of its KV cache"
            )

    def set(self, buffer: memoryview, sequence: int) -> None:
        """Load cells into an empty sequence: they take the first free places, in their order."""
        n_read = self._library.llama_state_seq_set_data(
            self._context.handle, _pointer(buffer), len(buffer), sequence
        )
        if n_read != len(buffer):
            raise BackendError("llama.cpp does not accept the saved KV")


class LlamaPrefix:
    """Saves and loads the prefix of one sequence of a context.

    Args:
        is_ordered: accept only cells in the order of their positions.
    """

    def __init__(self, state: SequenceState, is_ordered: bool) -> None:
        self._state, self._is_ordered = state, is_ordered

    def tensors(self, sequence: int) -> tuple[TensorShape, ...]:
        return (TensorShape(_NAME, "U8", (self._state.n_bytes(sequence),)),)

    def save(self, buffers: Mapping[str, memoryview], sequence: int) -> None:
        self._state.get(buffers[_NAME], sequence)

    def load(self, token_ids: Sequence[int], tensors: SavedTensors, sequence: int) -> None:
        """Load a prefix into an empty sequence; the caller checks its positions."""
        if set(tensors) != {_NAME}:
            raise BackendError("the saved KV is not llama.cpp's")
        _, buffer = tensors[_NAME]
        _check(buffer, len(token_ids), self._is_ordered)
        self._state.set(buffer, sequence)


class RecurrentPrefix:
    """Saves and loads the prefix of a sequence with recurrent layers: its tokens' number up to the
    state that passes begin from, and the cells and the state there."""

    def __init__(self, state: SequenceState) -> None:
        self._state = state

    def tensors(self, kv: RecurrentStore) -> tuple[TensorShape, ...]:
        sequence = kv.base_sequence
        n_bytes = 0 if sequence is None else self._state.n_bytes(sequence)
        return (TensorShape(_BASE, "I32", (1,)), TensorShape(_NAME, "U8", (n_bytes,)))

    def save(self, kv: RecurrentStore, buffers: Mapping[str, memoryview]) -> None:
        buffers[_BASE][:] = struct.pack("<i", kv.n_base)
        if kv.base_sequence is not None:
            self._state.get(buffers[_NAME], kv.base_sequence)

    def load(self, kv: RecurrentStore, token_ids: list[int], tensors: SavedTensors) -> None:
        """Fill an empty store. Raises BackendError for tensors that are no such prefix."""
        if set(tensors) != {_BASE, _NAME} or len(tensors[_BASE][1]) != 4:
            raise BackendError("the saved KV is not llama.cpp's of a model with recurrent layers")
        (n_base,) = struct.unpack("<i", tensors[_BASE][1])
        buffer = tensors[_NAME][1]
        if not 0 <= n_base <= len(token_ids) or bool(n_base) != bool(len(buffer)):
            raise BackendError(
                f"the saved state is of {n_base} tokens, which are not in {len(token_ids)}"
            )

        def read(sequence: int) -> None:
            self._state.set(buffer, sequence)
            if self._state.n_bytes(sequence) != len(buffer):
                raise BackendError("llama.cpp reads another state than was saved")

        kv.load(token_ids, n_base, read)


def _check(buffer: memoryview, n_tokens: int, is_ordered: bool) -> None:
    """Raise BackendError unless the bytes are `n_tokens` cells: llama.cpp allocates by them."""
    if not any(_is_state(buffer, n_tokens, n, is_ordered) for n in _CELL_BYTES):
        raise BackendError(f"the saved KV is not llama.cpp's of {n_tokens} tokens")


def _is_state(buffer: memoryview, n_tokens: int, cell_bytes: int, is_ordered: bool) -> bool:
    """Return whether the bytes are a complete cache of one stream.

    Format: streams, cells; for each cell its position, 1 and its sequence; whether values are
    transposed, layers; for each layer the type and row size of its keys, and the rows; the same
    for the values, or the type, the size of a number and the numbers of a token.
    """
    try:
        n_streams, n_cells = struct.unpack_from("<2I", buffer, _HEAD_BYTES)
        start = _HEAD_BYTES + 8
        position = start + n_tokens * cell_bytes
        cells = np.frombuffer(buffer[start:position], "<i4").reshape(n_tokens, -1)
        positions = cells[:, 0] if is_ordered else np.sort(cells[:, 0])
        if not np.array_equal(positions, np.arange(n_tokens)) or np.any(cells[:, 1] != 1):
            return False
        is_transposed, n_layers = struct.unpack_from("<2I", buffer, position)
        if (n_streams, n_cells) != (1, n_tokens) or n_layers > _MAX_LAYERS:
            return False
        position += 8
        for i in range(2 * n_layers):
            if is_transposed and i >= n_layers:
                _, number, width = struct.unpack_from("<3I", buffer, position)
                n_row_bytes = number * width
            else:
                _, n_row_bytes = struct.unpack_from("<iQ", buffer, position)
            position += 12 + n_tokens * n_row_bytes
    except (struct.error, OverflowError, ValueError):  # truncated
        return False
    return position == len(buffer)


def _pointer(buffer: memoryview) -> ctypes._Pointer[ctypes.c_uint8]:
    return np.frombuffer(buffer, np.uint8).ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
