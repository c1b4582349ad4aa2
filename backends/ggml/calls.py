"""GgmlCalls: base of calls of single operators of ggml on any memory of this process."""

from __future__ import annotations

from collections.abc import Iterable

from backends.ggml.operators import InitParams, load_ggml

_CONTEXT_BYTES = 64 << 10
"""Memory for headers of some tensors and a graph; ggml aborts if they do not fit."""
_GRAPH_NODES = 8
_FIRST_ADDRESS, _N_ADDRESSES = 4096, 1 << 47
"""Range of all user space addresses, as one ggml buffer: tensors may lie anywhere in it."""


class GgmlCalls:
    """Calls of one operator at a time, for use by one thread. `close` frees a few KiB.

    Raises LlamaError if llama-cpp-python is missing.
    """

    def __init__(self) -> None:
        self._ggml = load_ggml()
        self._context = self._ggml.init(InitParams(_CONTEXT_BYTES, None, True))
        self._backend = self._ggml.backend_init()
        self._memory = self._ggml.buffer_from_ptr(_FIRST_ADDRESS, _N_ADDRESSES)

    def _begin(self) -> None:
        """Forget the tensors of the call before."""
        self._ggml.reset(self._context)

    def _place(self, tensors: Iterable[tuple[int, int]]) -> None:
        """Let tensors lie at addresses."""
        for tensor, address in tensors:
            self._ggml.tensor_alloc(self._memory, tensor, address)

    def _compute(self, result: int, n_threads: int) -> None:
        """Compute a tensor. Raises RuntimeError if ggml does not."""
        ggml = self._ggml
        graph = ggml.new_small_graph(self._context, _GRAPH_NODES, False)
        ggml.expand(graph, result)
        ggml.set_n_threads(self._backend, n_threads)
        if ggml.backend_compute(self._backend, graph) != 0:
            raise RuntimeError("ggml did not compute an operator")

    def close(self) -> None:
        """Free ggml's objects. Idempotent."""
        context, self._context = self._context, None
        if context:
            self._ggml.buffer_free(self._memory)
            self._ggml.backend_free(self._backend)
            self._ggml.free(context)

    def __del__(self) -> None:
        if hasattr(self, "_memory"):
            self.close()
