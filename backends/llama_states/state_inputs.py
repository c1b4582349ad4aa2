"""StateInputs: roll recurrent states back to a token in the middle of a pass.

A recurrent layer replaces its state with every token, so a pass leaves the state after its last
one. What layers put into their states is small beside them: the inputs of a convolution, and keys,
values and gates of Gated DeltaNet. They are copied during the pass. If fewer of its tokens are
accepted, the state after those follows from the state before the pass, by ggml's own operator, and
replaces the one in llama.cpp's memory.

Graphs with other recurrent layers are not known here: their accepted tokens are computed again with
the next nodes (RecurrentStore).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backends.ggml.gated_delta import GatedDeltaNet
from backends.ggml.library import LlamaError
from backends.ggml.tensor import F32, NO_WORK, Tensor

_CONVOLUTION_STATES, _LAYER_STATES = b"cache_r_l", b"cache_s_l"
"""Prefixes of llama.cpp's names of recurrent states. Some graphs rename some of them; all are in
one buffer."""
_CPY, _CONCAT, _GET_ROWS, _DELTA = b"CPY", b"CONCAT", b"GET_ROWS", b"GATED_DELTA_NET"
_SCALE = b"SCALE"
"""Zeroes the state of a new sequence, before the layer reads it."""
_N_SOURCES = 6  # of _DELTA: queries, keys, values, gates, betas, state
_NUMBER_BYTES = 4


@dataclass(frozen=True)
class _Convolution:
    """The inputs of a layer's convolution.

    state: address of the state after the pass, the last `width` inputs of each channel.
    inputs: float32 [channels, width + tokens], those of the state before the pass first.
    """

    state: int
    inputs: np.ndarray
    width: int


@dataclass(frozen=True)
class _Delta:
    """The inputs of a layer of Gated DeltaNet.

    state, before: addresses of the states after and before the pass.
    inputs: keys, values, gates and betas, float32 [tokens, heads, ...].
    """

    state: int
    before: int
    inputs: tuple[np.ndarray, ...]


class StateInputs:
    """Inputs of the recurrent layers in the last pass of one context.

    Args:
        n_threads: maximum number of threads.
        max_tokens: maximum tokens at the beginning of a pass whose inputs are kept.
        n_bytes: memory for the inputs of so many tokens, taken at once.
    """

    def __init__(self, n_threads: int, max_tokens: int, n_bytes: int) -> None:
        self._n_threads, self._max_tokens = n_threads, max_tokens
        self._operator = GatedDeltaNet()
        self._memory = np.full(n_bytes // _NUMBER_BYTES, 0.0, dtype=np.float32)
        self._n_used = 0
        self._parts: list[_Convolution | _Delta] = []
        self._n_parts = 0
        """Parts of a complete pass."""
        self._row: int | None = None
        """Row of the states before the pass, in all layers."""
        self._start: tuple[int, int] | None = None
        """See `begin`; None: the last pass is not kept."""

    def close(self) -> None:
        """Free the memory. Idempotent."""
        self.begin(None)
        self._memory = np.empty(0, dtype=np.float32)
        self._operator.close()

    def begin(self, start: tuple[int, int] | None, n_parts: int = 0) -> None:
        """Begin a pass.

        start: (llama.cpp sequence, its tokens before the pass); None: keep nothing.
        n_parts: layers' parts in its graph.
        """
        self._start, self._n_parts, self._row = start, n_parts, None
        self._parts, self._n_used = [], 0

    def take(self, address: int) -> None:
        """Copy what a node, just computed, has written into a state, by its ggml_tensor."""
        node = Tensor.from_address(address)
        if not node.view_src:
            self._row = _single_row(node)
            return
        source = _source(node)
        if source.src[_N_SOURCES - 1] is None:
            width = Tensor.from_address(node.src[0]).ne[0]
            n_inputs = min(source.ne[0], width + self._max_tokens)
            inputs = self._copy(source, (source.ne[1], n_inputs))
            self._parts.append(_Convolution(node.data, inputs, width))
            return
        assert self._row is not None, "a layer before this copy has read it"
        tensors = [Tensor.from_address(source.src[i]) for i in range(1, 5)]
        num_tokens = min(tensors[0].ne[2], self._max_tokens)
        copies = (self._copy(each, (num_tokens, each.ne[1], each.ne[0])) for each in tensors)
        states = _source(_viewed(source.src[5]))
        before = states.data + self._row * states.nb[1]
        self._parts.append(_Delta(node.data, before, tuple(copies)))

    def can_roll_back(self, sequence: int, n_before: int, num_tokens: int) -> bool:
        """Return whether the last pass was of a sequence with `n_before` tokens before it, the
        state of those is still there, and the inputs of its first `num_tokens` are kept."""
        if self._start != (sequence, n_before) or num_tokens > self._max_tokens:
            return False
        if not self._parts or len(self._parts) != self._n_parts:
            return False
        deltas = (part for part in self._parts if isinstance(part, _Delta))
        return n_before == 0 or all(part.before != part.state for part in deltas)

    def roll_back(self, num_tokens: int) -> None:
        """Replace the states after the pass with those after its first `num_tokens` tokens."""
        assert self._start is not None
        is_from_zero, self._start = self._start[1] == 0, None  # once: its end is overwritten
        for part in self._parts:
            if isinstance(part, _Convolution):
                end = num_tokens + part.width
                state = np.ascontiguousarray(part.inputs[:, num_tokens:end])
            else:
                keys, values, gates, betas = (each[:num_tokens] for each in part.inputs)
                before = None if is_from_zero else part.before
                state = self._operator.state_after(
                    before, keys, values, gates, betas, self._n_threads
                )
            ctypes.memmove(part.state, state.ctypes.data, state.nbytes)

    def _copy(self, tensor: Tensor, shape: tuple[int, ...]) -> np.ndarray:
        """Return a copy of the first numbers of a float32 tensor, shape in numpy's order; an empty
        one if memory is used up."""
        strides = tuple(tensor.nb[: len(shape)])[::-1]
        start, self._n_used = self._n_used, self._n_used + int(np.prod(shape))
        if self._n_used > len(self._memory):  # a graph repeats keys: not kept, and computed again
            self._start = None
            return np.empty(0, dtype=np.float32)
        copy = self._memory[start : self._n_used].reshape(shape)
        spans = ((n - 1) * step for n, step in zip(shape, strides, strict=True))
        raw = (ctypes.c_ubyte * (_NUMBER_BYTES + sum(spans))).from_address(tensor.data)
        np.copyto(copy, np.ndarray(shape, np.float32, raw, strides=strides))
        return copy


class StateNodes:
    """The nodes of a graph that read and write recurrent states.

    op_name: name of the operator of a ggml_tensor, by its address.
    """

    def __init__(self, op_name: Callable[[int], bytes]) -> None:
        self._op_name = op_name
        self._rows: int | None = None
        self._writes: list[tuple[int, int, bool]] = []
        """(number, buffer, whether it is known) of nodes that write to memory of other tensors."""
        self._buffers: set[int] = set()
        """Buffers of states that llama.cpp has not renamed."""
        self._last_work = 0  # address of the last node that computes something

    @property
    def n_parts(self) -> int:
        return len(self._parts)

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the nodes to take; none if a state is written in a way that is not known."""
        rows = () if self._rows is None or not self._parts else (self._rows,)
        return frozenset((*self._parts, *rows))

    @property
    def _parts(self) -> tuple[int, ...]:
        states = [
            (number, known) for number, buffer, known in self._writes if buffer in self._buffers
        ]
        return tuple(number for number, _ in states) if all(known for _, known in states) else ()

    def see(self, number: int, address: int) -> None:
        """Take the next node; called with all of them."""
        op, before = self._op_name(address), self._last_work
        if op in NO_WORK:
            return
        self._last_work = address
        node = Tensor.from_address(address)
        if 0 in tuple(node.ne):
            return
        # The row is read where the first layer has read it: later its number may be overwritten.
        if op == _GET_ROWS and self._rows is None and _reads_layer_state(node):
            self._rows = number
        if not node.view_src or op == _SCALE:
            return
        written = Tensor.from_address(node.view_src)
        if written.name.startswith((_CONVOLUTION_STATES, _LAYER_STATES)) and written.buffer:
            self._buffers.add(written.buffer)
        is_known = op == _CPY and self._is_known(node, before)
        self._writes.append((number, written.buffer or 0, is_known))

    def _is_known(self, node: Tensor, before: int) -> bool:
        view, at = Tensor.from_address(node.src[0]), _viewed_address(node.src[0])
        source = Tensor.from_address(at)
        if node.type != F32 or source.type != F32:
            return False
        if self._op_name(at) == _CONCAT:
            end = (source.ne[0] - view.ne[0]) * source.nb[0]
            is_end = view.view_offs == end and view.nb[1] == source.nb[1]
            is_whole = view.ne[1] == source.ne[1] and source.ne[2] == source.ne[3] == 1
            return is_end and is_whole
        # The inputs are read after the copy, so nothing may be computed in their memory before it.
        if self._op_name(at) != _DELTA or at != before or self._rows is None:
            return False
        inputs = [Tensor.from_address(source.src[i]) for i in range(_N_SOURCES)]
        values, states = inputs[2], _viewed_address(source.src[5])
        n_outputs = values.ne[0] * values.ne[1] * values.ne[2]
        is_last_state = source.op_params[0] == 1 and view.view_offs == n_outputs * _NUMBER_BYTES
        is_one_sequence = all(each.ne[3] == 1 for each in inputs)
        are_floats = all(each.type == F32 for each in inputs)
        is_row = self._op_name(states) == _GET_ROWS
        return is_last_state and is_one_sequence and are_floats and is_row


def _viewed_address(address: int) -> int:
    """Return the address of the tensor that a view shows, or of a tensor that is none."""
    return Tensor.from_address(address).view_src or address


def _viewed(address: int) -> Tensor:
    return Tensor.from_address(_viewed_address(address))


def _source(node: Tensor) -> Tensor:
    """Return the tensor that a node's first source shows."""
    return _viewed(node.src[0])


def _reads_layer_state(node: Tensor) -> bool:
    return bool(_source(node).name.startswith(_LAYER_STATES))


def _single_row(node: Tensor) -> int:
    """Return the number of the row that a GET_ROWS node has copied."""
    rows, ids = (Tensor.from_address(node.src[i]) for i in range(2))
    row = ctypes.c_int32.from_address(ids.data).value
    if not 0 <= row < rows.ne[1]:
        raise LlamaError(f"llama.cpp reads state {row} of {rows.ne[1]}: use --load-mode mmap")
    return row
