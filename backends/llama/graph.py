"""Which layers the nodes of a ggml graph read, and where each layer ends."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

from backends.contract.backend import UnsupportedModel
from backends.ggml.library import LlamaError
from offload.residency.placement import LayerWeights

_NO_WORK = {b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE"}
Node = frozenset[int]
"""The layers that a node of the graph reads from."""


class Tensor(ctypes.Structure):
    """The head of ggml_tensor in ggml.h; `_check_layout` compares it with ggml's own accessors."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    ]


_OP, _SRC, _DATA = Tensor.op.offset, Tensor.src.offset, Tensor.data.offset
_CACHE_NAME = b"cache_k_l"
"""Of the tensors with the keys: so llama.cpp calls them. All of a cache is in one buffer."""
_Sources = ctypes.c_void_p * 10


@dataclass(frozen=True)
class PassSchedule:
    """Where the layers end in a graph of `n_nodes` nodes."""

    n_nodes: int
    ends: Mapping[int, int]  # number of a node -> the layer that it is the last one to read


def make_schedule(nodes: Sequence[Node], layers: Sequence[LayerWeights]) -> PassSchedule:
    """Find the end of each streamed layer.

    Raises:
        UnsupportedModel: a layer's tensors are not read between those of its neighbours.
    """
    streamed = [i for i, layer in enumerate(layers) if layer.streamed]
    ends: dict[int, int] = {}
    behind = -1
    for layer in streamed:
        readers = [k for k, touched in enumerate(nodes) if layer in touched]
        if not readers:
            raise UnsupportedModel(f"llama.cpp does not read layer {layer}: it cannot be streamed")
        if readers[0] <= max(behind, 0):  # the first node runs while a graph is looked at
            raise UnsupportedModel(
                f"llama.cpp reads layer {layer} before it is done with the one before: "
                "this architecture cannot be streamed, use --load-mode mmap"
            )
        behind = readers[-1]
        ends[behind] = layer
    return PassSchedule(len(nodes), ends)


class GraphReader:
    """Tells which layers a node reads, by the addresses of its sources."""

    def __init__(self, library: ModuleType, ranges: Iterable[tuple[int, int, int]]) -> None:
        self._ranges = sorted(ranges)  # (start, end, layer)
        self._starts = [start for start, _, _ in self._ranges]
        self._lib = library._lib
        for name in ("ggml_get_name", "ggml_op_name"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        for name in ("ggml_get_data", "ggml_backend_buffer_get_base"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.ggml_backend_buffer_get_size.restype = ctypes.c_size_t
        self._op_names: dict[int, bytes] = {}
        self._is_checked = False

    def layers_read(self, address: int) -> Node:
        """`address` is that of a node's ggml_tensor."""
        if not self._is_checked:
            self._check_layout(address)
        if self._op_name(ctypes.c_int.from_address(address + _OP).value) in _NO_WORK:
            return frozenset()
        sources = _Sources.from_address(address + _SRC)
        data = (ctypes.c_void_p.from_address(at + _DATA).value for at in sources if at)
        found = (self._layer_at(at) for at in data if at)
        return frozenset(layer for layer in found if layer is not None)

    def cache_memory(self, address: int) -> tuple[int, int] | None:
        """(address, bytes) of the KV cache that a node reads from or writes to, if it does.

        `address` is that of the node's ggml_tensor, of which `layers_read` was asked before.
        """
        for at in _Sources.from_address(address + _SRC):
            source = None if at is None else Tensor.from_address(at)
            if source is None or not source.name.startswith(_CACHE_NAME) or not source.buffer:
                continue
            buffer = ctypes.c_void_p(source.buffer)
            base = self._lib.ggml_backend_buffer_get_base(buffer)
            return base, self._lib.ggml_backend_buffer_get_size(buffer)
        return None

    def _layer_at(self, address: int) -> int | None:
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0 or address >= self._ranges[i][1]:
            return None
        return self._ranges[i][2]

    def _op_name(self, op: int) -> bytes:
        if op not in self._op_names:
            self._op_names[op] = self._lib.ggml_op_name(op)
        return self._op_names[op]

    def _check_layout(self, address: int) -> None:
        node, pointer = Tensor.from_address(address), ctypes.c_void_p(address)
        found = (self._lib.ggml_get_name(pointer), self._lib.ggml_get_data(pointer))
        if found != (node.name, node.data):
            raise LlamaError(
                "this llama-cpp-python lays out ggml_tensor in another way than specdec knows: "
                "use version 0.3.36, or --load-mode mmap"
            )
        self._is_checked = True
