"""Find out which layers the nodes of a ggml graph read, and where each layer ends."""

from __future__ import annotations

import bisect
import ctypes
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from backends.contract.backend import UnsupportedModel
from backends.ggml.layer_outputs import LayerOutputs
from backends.ggml.library import LlamaError
from backends.ggml.tensor import NO_WORK, Tensor
from backends.llama_states.state_inputs import StateNodes
from offload.placement.placement import LayerWeights

_BY_EXPERT = b"MUL_MAT_ID"
Node = frozenset[int]
"""The layers that a node of the graph reads from."""
Ranges = Iterable[tuple[int, int, int]]
"""(start, end, layer) of addresses."""


_OP, _SRC, _DATA = Tensor.op.offset, Tensor.src.offset, Tensor.data.offset
_CACHE_NAME = b"cache_k_l"
"""Prefix of llama.cpp's names for key tensors. All tensors of a cache are in one buffer."""
_Sources = ctypes.c_void_p * 10
_ID_BYTES = 4


@dataclass(frozen=True)
class PassSchedule:
    """Nodes of a graph of `n_nodes` nodes after which to call back."""

    n_nodes: int
    ends: Mapping[int, int]  # number of a node -> the layer that it is the last one to read
    routers: Mapping[int, int]  # number of a node -> the layer whose experts it chooses
    outputs: Mapping[int, int]  # number of a node -> the layer whose output it is
    states: frozenset[int] = frozenset()  # numbers of nodes to take recurrent states' inputs at
    n_state_parts: int = 0

    def calls_back_after(self, number: int) -> bool:
        return number in self.ends or number in self.routers or number in self.outputs


def make_schedule(
    nodes: Sequence[Node],
    layers: Sequence[LayerWeights],
    routers: Mapping[int, int] | None = None,
    outputs: Mapping[int, int] | None = None,
    states: StateNodes | None = None,
) -> PassSchedule:
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
        if readers[0] <= max(behind, 0):  # the first node runs while a graph is recorded
            raise UnsupportedModel(
                f"llama.cpp reads layer {layer} before it is done with the one before: "
                "this architecture cannot be streamed, use --load-mode mmap"
            )
        behind = readers[-1]
        ends[behind] = layer
    taken = (states.numbers, states.n_parts) if states is not None else (frozenset(), 0)
    return PassSchedule(len(nodes), ends, routers or {}, outputs or {}, *taken)


class _AddressMap:
    """A map from addresses to the layers whose weights lie there."""

    def __init__(self, ranges: Ranges) -> None:
        self._ranges = sorted(ranges)
        self._starts = [start for start, _, _ in self._ranges]

    def layer_at(self, address: int) -> int | None:
        i = bisect.bisect_right(self._starts, address) - 1
        if i < 0 or address >= self._ranges[i][1]:
            return None
        return self._ranges[i][2]


class RoutedNodes:
    """Finds the nodes of a graph that choose experts: those whose values are the ids of MUL_MAT_ID
    nodes. `see` is called with all nodes in order."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        """Numbers of nodes by the address of their tensor."""
        self._chosen: dict[int, set[int]] = {}
        """Addresses of the ids of chosen experts, by layer."""

    def see(self, address: int, layer: int | None, is_by_expert: bool) -> None:
        """Take the next node; `layer`: the layer whose experts it reads.

        Raises UnsupportedModel if it reads them in another way than by ids of chosen experts.
        """
        self._numbers[address] = len(self._numbers)
        if layer is None:
            return
        ids = _Sources.from_address(address + _SRC)[2] if is_by_expert else None
        if ids is None:
            raise UnsupportedModel(
                f"llama.cpp reads the experts of layer {layer} in a way that specdec does not "
                "know: use --load-mode mmap"
            )
        self._chosen.setdefault(layer, set()).add(ids)

    def routers(self, layers: Iterable[int]) -> dict[int, int]:
        """Return layers by node number. Raises UnsupportedModel unless each layer has one node."""
        layer_of: dict[int, int] = {}
        for layer in layers:
            ids = [self._numbers.get(address) for address in self._chosen.get(layer, ())]
            if len(ids) != 1 or ids[0] is None or ids[0] in layer_of:
                raise UnsupportedModel(
                    f"llama.cpp chooses the experts of layer {layer} {len(ids)} times instead of "
                    "once in a pass: use --load-mode mmap"
                )
            layer_of[ids[0]] = layer
        return layer_of


def chosen_experts(address: int) -> np.ndarray:
    """Return the ids that a node computed, int32 [tokens, experts of a token], in place.

    The last layer has no tokens in a pass without logits, such as a chunk of a long prompt.
    """
    node = Tensor.from_address(address)
    n_used, num_tokens = node.ne[0], node.ne[1]
    n_bytes = max(0, num_tokens - 1) * node.nb[1] + n_used * _ID_BYTES
    raw = (ctypes.c_ubyte * n_bytes).from_address(node.data)
    strides = (node.nb[1], node.nb[0])
    return np.ndarray((num_tokens, n_used), np.int32, raw, strides=strides)


class GraphReader:
    """Reads ggml's nodes: which layers they use, by the addresses of their sources.

    Args:
        ranges: addresses of the layers' weights.
        experts: addresses of the layers' routed experts, which are no part of `ranges`.
    """

    def __init__(self, library: ModuleType, ranges: Ranges, experts: Ranges = ()) -> None:
        self._weights, self._experts = _AddressMap(ranges), _AddressMap(experts)
        self._lib = library._lib
        for name in ("ggml_get_name", "ggml_op_name"):
            getattr(self._lib, name).restype = ctypes.c_char_p
        for name in ("ggml_get_data", "ggml_backend_buffer_get_base"):
            getattr(self._lib, name).restype = ctypes.c_void_p
        self._lib.ggml_backend_buffer_get_size.restype = ctypes.c_size_t
        self._op_names: dict[int, bytes] = {}
        self._is_checked = False

    def layers_read(self, address: int) -> Node:
        """Return the layers that a node reads; `address` is that of its ggml_tensor."""
        if not self._is_checked:
            self._check_layout(address)
        if self.op_name(address) in NO_WORK:
            return frozenset()
        layers = map(self._weights.layer_at, self._read_addresses(address))
        return frozenset(layer for layer in layers if layer is not None)

    def show(self, address: int, routed: RoutedNodes) -> None:
        """Pass a node on to `routed`, after `layers_read`."""
        name = self.op_name(address)
        layers = map(self._experts.layer_at, self._read_addresses(address))
        layer = next((x for x in layers if x is not None), None)
        routed.see(address, None if name in NO_WORK else layer, name == _BY_EXPERT)

    def cache_memory(self, address: int) -> tuple[int, int] | None:
        """Return (address, bytes) of the KV cache that a node reads or writes, or None.

        Call it after `layers_read`; `address` is that of the node's ggml_tensor.
        """
        for at in _Sources.from_address(address + _SRC):
            source = None if at is None else Tensor.from_address(at)
            if source is None or not source.name.startswith(_CACHE_NAME) or not source.buffer:
                continue
            buffer = ctypes.c_void_p(source.buffer)
            base = self._lib.ggml_backend_buffer_get_base(buffer)
            return base, self._lib.ggml_backend_buffer_get_size(buffer)
        return None

    def _read_addresses(self, address: int) -> Iterator[int]:
        """Yield the addresses of the data of a node's sources."""
        for at in _Sources.from_address(address + _SRC):
            data = ctypes.c_void_p.from_address(at + _DATA).value if at else None
            if data:
                yield data

    def op_name(self, address: int) -> bytes:
        """Return the name of the operator of a ggml_tensor."""
        op = ctypes.c_int.from_address(address + _OP).value
        if op not in self._op_names:
            self._op_names[op] = self._lib.ggml_op_name(op)
        return self._op_names[op]

    def _check_layout(self, address: int) -> None:
        node, pointer = Tensor.from_address(address), ctypes.c_void_p(address)
        name_and_data = (self._lib.ggml_get_name(pointer), self._lib.ggml_get_data(pointer))
        if name_and_data != (node.name, node.data):
            raise LlamaError(
                "this llama-cpp-python lays out ggml_tensor in another way than specdec knows: "
                "use version 0.3.36, or --load-mode mmap"
            )
        self._is_checked = True


class GraphRecord:
    """Notes what the nodes of one graph show; `add` is called with all of them in order.

    Args:
        outputs: names the nodes that are outputs of layers which a draft head asks for.
    """

    def __init__(self, reader: GraphReader, outputs: LayerOutputs | None) -> None:
        self._reader, self._outputs = reader, outputs
        self._nodes: list[Node] = []
        self._routed = RoutedNodes()
        self._output_nodes: dict[int, int] = {}
        self._states = StateNodes(reader.op_name)
        self.caches: set[tuple[int, int]] = set()
        """(address, bytes) of the KV caches; some architectures have two."""

    def add(self, tensor: int) -> None:
        """Take the next node, by the address of its ggml_tensor."""
        number = len(self._nodes)
        self._nodes.append(self._reader.layers_read(tensor))
        self._reader.show(tensor, self._routed)
        self._states.see(number, tensor)
        layer = None if self._outputs is None else self._outputs.layer_of(tensor)
        if layer is not None:
            self._output_nodes[number] = layer
        cache = self._reader.cache_memory(tensor)
        if cache is not None:
            self.caches.add(cache)

    def schedule(self, layers: Sequence[LayerWeights], mixed: Iterable[int]) -> PassSchedule:
        """Return the schedule of passes over this graph.

        mixed: layers whose experts are read on demand.
        """
        routers = self._routed.routers(mixed)
        return make_schedule(self._nodes, layers, routers, self._output_nodes, self._states)


def check_one_split(log: Iterable[str]) -> None:
    """Raise LlamaError if llama.cpp logs that it computes a graph in several parts, each of which
    calls back on its own."""
    matches = [match for line in log if (match := re.search(r"splits = (\d+)", line))]
    if not matches or int(matches[-1].group(1)) != 1:
        n_splits = matches[-1].group(1) if matches else "an unknown number of"
        raise LlamaError(
            f"llama.cpp divides the graph into {n_splits} parts (a GPU or BLAS build): "
            "streaming needs a plain CPU build, or use --load-mode mmap"
        )
