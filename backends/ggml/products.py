"""GgmlProducts: matrix products by ggml's kernels, on any memory of this process."""

from __future__ import annotations

from backends.ggml.calls import GgmlCalls
from backends.ggml.operators import F32


class GgmlProducts(GgmlCalls):
    """Matrix products; see GgmlCalls."""

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
        self._begin()
        left = self._ggml.new_2d(self._context, type_id, n_in, n_out)
        right = self._ggml.new_2d(self._context, type_id, n_in, num_tokens)
        self._place([(left, weight)])
        self._multiply(left, right, rows, result, n_threads)

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
        self._begin()
        right = self._ggml.new_2d(self._context, F32, n_in, num_tokens)
        self._multiply(weight, right, rows, result, n_threads)

    def _multiply(self, left: int, right: int, rows: int, result: int, n_threads: int) -> None:
        product = self._ggml.mul_mat(self._context, left, right)
        self._place([(right, rows), (product, result)])
        self._compute(product, n_threads)
