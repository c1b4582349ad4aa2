"""StateInputs: recurrent states after the first tokens of a pass, without another pass.

A recurrent layer replaces its state with every token, so a pass leaves the state after its last
one. What layers put into their states is small beside them: the inputs of a convolution, and keys,
values and gates of Gated DeltaNet. They are copied during the pass. If fewer of its tokens are
accepted, the state after those follows from the state before the pass, by ggml's own operator, and
replaces the one in llama.cpp's memory.

Other recurrent layers are not known here: their accepted tokens are computed again with the next
nodes (RecurrentStore).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from backends.ggml.gated_delta import GatedDeltaNet
from backends.ggml.tensor import F32, Tensor

_CACHES = (b"cache_r_l", b"cache_s_l")
"""Prefixes of llama.cpp's names of recurrent states: of convolutions, and of the layers."""
_COPY, _JOINED, _ROWS, _DELTA = b"CPY", b"CONCAT", b"GET_ROWS", b"GATED_DELTA_NET"
_N_INPUTS = 6  # queries, keys, values, gates, betas, state


@dataclass(frozen=True)
class _Convolution:
    """state: address of the state after the pass, the last `width` inputs of each channel.
    inputs: float32 [channels, width + tokens], those of the state before the pass first."""

    state: int
    inputs: np.ndarray
    width: int


@dataclass(frozen=True)
class _Delta:
    """state, before: addresses of the states after and before the pass. inputs: keys, values, gates
    and betas, float32 [tokens, heads, ...]."""

    state: int
    before: int
    inputs: tuple[np.ndarray, ...]


class StateInputs:
    """Inputs of the recurrent layers in the last pass of one context.

    Args:
        n_threads: maximum number of threads.
    """

    def __init__(self, n_threads: int) -> None:
        self._n_threads = n_threads
        self._operator = GatedDeltaNet()
        self._buffers: list[np.ndarray] = []
        """Memory of the copies, which every pass uses again in the same order."""
        self._n_used = 0
        self._parts: list[_Convolution | _Delta] = []
        self._n_parts = -1
        """Number of parts of a complete pass; -1: nothing is taken."""
        self._pass: tuple[int, int] | None = None

    @property
    def are_taken(self) -> bool:
        """Whether the running pass is one whose inputs are taken."""
        return self._pass is not None

    def begin(self, begun_at: tuple[int, int] | None, n_parts: int = 0) -> None:
        """Begin a pass.

        begun_at: (llama.cpp sequence, its tokens before the pass); None: take nothing.
        n_parts: nodes of its graph that will be taken.
        """
        self._pass, self._n_parts = (begun_at if n_parts else None), n_parts
        self._parts, self._n_used = [], 0

    def take(self, address: int) -> None:
        """Copy what a node, just computed, has written into a state, by its ggml_tensor."""
        node = Tensor.from_address(address)
        source = _whole(node.src[0])
        if _is_convolution(node):
            width = Tensor.from_address(node.src[0]).ne[0]
            part: _Convolution | _Delta = _Convolution(node.data, self._copied(source, 2), width)
        else:
            inputs = [Tensor.from_address(source.src[i]) for i in range(_N_INPUTS)]
            copies = tuple(self._copied(each, 3) for each in inputs[1:5])
            part = _Delta(node.data, _row_address(_whole(source.src[5])), copies)
        self._parts.append(part)

    def can_return(self, sequence: int, num_tokens: int) -> bool:
        """Return whether the last pass was of a sequence with so many tokens before it, and a state
        of theirs that is still there."""
        if self._pass != (sequence, num_tokens) or len(self._parts) != self._n_parts:
            return False
        deltas = (part for part in self._parts if isinstance(part, _Delta))
        return num_tokens == 0 or all(part.before != part.state for part in deltas)

    def return_to(self, num_tokens: int) -> None:
        """Replace the states after the pass with those after its first `num_tokens` tokens."""
        assert self._pass is not None
        is_from_zero = self._pass[1] == 0
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
        self._pass = None  # its end is no more

    def _copied(self, tensor: Tensor, n_dimensions: int) -> np.ndarray:
        """Return a copy of a float32 tensor, shape in numpy's order."""
        shape = tuple(tensor.ne[:n_dimensions])[::-1]
        strides = tuple(tensor.nb[:n_dimensions])[::-1]
        n_numbers = int(np.prod(shape))
        if self._n_used == len(self._buffers):
            self._buffers.append(np.empty(0, dtype=np.float32))
        if len(self._buffers[self._n_used]) < n_numbers:
            self._buffers[self._n_used] = np.empty(n_numbers, dtype=np.float32)
        copy = self._buffers[self._n_used][:n_numbers].reshape(shape)
        self._n_used += 1
        n_bytes = 4 + sum((n - 1) * step for n, step in zip(shape, strides, strict=True))
        raw = (ctypes.c_ubyte * n_bytes).from_address(tensor.data)
        np.copyto(copy, np.ndarray(shape, np.float32, raw, strides=strides))
        return copy


class StateNodes:
    """Finds the nodes of a graph that write recurrent states; `see` is called with all of them.

    op_name: name of the operator of a ggml_tensor, by its address.
    """

    def __init__(self, op_name: Callable[[int], bytes]) -> None:
        self._op_name = op_name
        self._known: set[int] = set()
        self._are_known = True

    @property
    def numbers(self) -> frozenset[int]:
        """Numbers of the nodes to take; none if a state is written in a way that is not known."""
        return frozenset(self._known) if self._are_known else frozenset()

    def see(self, number: int, address: int) -> None:
        node = Tensor.from_address(address)
        if self._op_name(address) != _COPY or 0 in tuple(node.ne):
            return
        if not _whole(address).name.startswith(_CACHES):
            return
        self._known.add(number)
        self._are_known = self._are_known and self._is_known(node)

    def _is_known(self, node: Tensor) -> bool:
        at = _whole_address(node.src[0])
        source = Tensor.from_address(at)
        if node.type != F32 or source.type != F32:
            return False
        if _is_convolution(node):
            view = Tensor.from_address(node.src[0])
            is_end = view.nb[1] == source.nb[1] and view.ne[1] == source.ne[1]
            return self._op_name(at) == _JOINED and source.ne[2] == source.ne[3] == 1 and is_end
        if self._op_name(at) != _DELTA:
            return False
        inputs = [Tensor.from_address(source.src[i]) for i in range(_N_INPUTS)]
        state = _whole_address(source.src[5])
        is_one_sequence = all(each.ne[3] == 1 for each in inputs)
        are_floats = all(each.type == F32 for each in inputs)
        return is_one_sequence and are_floats and self._op_name(state) == _ROWS


def _is_convolution(node: Tensor) -> bool:
    """Return whether a node writes the state of a convolution."""
    return bool(Tensor.from_address(node.view_src).name.startswith(_CACHES[0]))


def _whole_address(address: int) -> int:
    """Return the address of the tensor that a view shows, or of a tensor that is none."""
    return Tensor.from_address(address).view_src or address


def _whole(address: int) -> Tensor:
    return Tensor.from_address(_whole_address(address))


def _row_address(rows: Tensor) -> int:
    """Return the address of the one row that a GET_ROWS node copied."""
    table, ids = (Tensor.from_address(rows.src[i]) for i in range(2))
    index = ctypes.c_int32.from_address(ids.data).value
    address: int = table.data + index * table.nb[1]
    return address
