"""GgmlProducts: matrix products by ggml's kernels, on any memory of this process."""

from __future__ import annotations

from backends.ggml.operators import F32, InitParams, load_ggml

_CONTEXT_BYTES = 64 << 10
"""Memory for headers of three tensors and a graph; ggml aborts if they do not fit."""
_GRAPH_NODES = 8
_FIRST_ADDRESS, _N_ADDRESSES = 4096, 1 << 47
"""Range of all user space addresses, as one ggml buffer: tensors may lie anywhere in it."""


class GgmlProducts:
    """Matrix products, for use by one thread. `close` frees a few KiB.

    Raises LlamaError if llama-cpp-python is missing.
    """

    def __init__(self) -> None:
        self._ggml = load_ggml()
        self._context = self._ggml.init(InitParams(_CONTEXT_BYTES, None, True))
        self._backend = self._ggml.backend_init()
        self._memory = self._ggml.buffer_from_ptr(_FIRST_ADDRESS, _N_ADDRESSES)

    def multiply(
        self, type_id: int, weight: int, rows: int, result: int, shape: tuple[int, int, int],
        n_threads: int,
    ) -> None:  # fmt: skip
        """Compute result = rows · weightᵀ.

        Args:
            type_id: ggml's number of the format of weight and rows.
            weight, rows, result: addresses of [n_out, n_in] and [num_tokens, n_in] in that format,
                and of [num_tokens, n_out] in float32; all contiguous.
            shape: (num_tokens, n_in, n_out)
        """
        num_tokens, n_in, n_out = shape
        ggml, context = self._ggml, self._context
        ggml.reset(context)
        left = ggml.new_2d(context, type_id, n_in, n_out)
        right = ggml.new_2d(context, type_id, n_in, num_tokens)
        ggml.tensor_alloc(self._memory, left, weight)
        self._run(left, right, rows, result, n_threads)

    def multiply_with(
        self, weight: int, rows: int, result: int, shape: tuple[int, int], n_threads: int
    ) -> None:
        """Compute result = rows · weightᵀ with a loaded model's tensor, of any format and layout.

        Args:
            weight: address of its ggml_tensor, [n_out, n_in].
            rows, result: addresses of float32 [num_tokens, n_in] and [num_tokens, n_out].
            shape: (num_tokens, n_in)
        """
        num_tokens, n_in = shape
        self._ggml.reset(self._context)
        right = self._ggml.new_2d(self._context, F32, n_in, num_tokens)
        self._run(weight, right, rows, result, n_threads)

    def _run(self, left: int, right: int, rows: int, result: int, n_threads: int) -> None:
        ggml, context = self._ggml, self._context
        product = ggml.mul_mat(context, left, right)
        for tensor, address in ((right, rows), (product, result)):
            ggml.tensor_alloc(self._memory, tensor, address)
        graph = ggml.new_small_graph(context, _GRAPH_NODES, False)
        ggml.expand(graph, product)
        ggml.set_n_threads(self._backend, n_threads)
        if ggml.backend_compute(self._backend, graph) != 0:
            raise RuntimeError("ggml did not compute a product")

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
