"""GatedDeltaNet: the state of such a layer after some tokens, by ggml's own operator."""

from __future__ import annotations

import numpy as np

from backends.ggml.calls import GgmlCalls
from backends.ggml.operators import F32


class GatedDeltaNet(GgmlCalls):
    """Calls of ggml_gated_delta_net; see GgmlCalls."""

    def __init__(self) -> None:
        super().__init__()
        self._result = np.empty(0, dtype=np.float32)
        self._zeros = np.empty(0, dtype=np.float32)

    def state_after(
        self,
        state: int | None,
        keys: np.ndarray,
        values: np.ndarray,
        gates: np.ndarray,
        betas: np.ndarray,
        n_threads: int,
    ) -> np.ndarray:
        """Return the state after the tokens of `keys`: float32, flat, a view until the next call.

        The bits are those of llama.cpp's passes, which use the operator too: it goes from token to
        token, each head for itself.

        Args:
            state: address of the float32 [heads of values, width, width] before the tokens; None:
                zeros.
            keys, values: float32 [num_tokens, heads, width], contiguous.
            gates: float32 [num_tokens, heads of values, 1 or width], contiguous.
            betas: float32 [num_tokens, heads of values, 1], contiguous.
        """
        self._begin()
        num_tokens, n_heads, width = values.shape
        first = num_tokens * n_heads * width  # outputs of the tokens; they are not used
        n_numbers = first + n_heads * width * width
        if len(self._result) < n_numbers:
            self._result = np.empty(n_numbers, dtype=np.float32)
        arrays = (keys, values, gates, betas)
        k, v, g, b = (self._ggml.new_3d(self._context, F32, *a.shape[::-1]) for a in arrays)
        s = self._ggml.new_3d(self._context, F32, width, width, n_heads)
        # A state needs no queries.
        result = self._ggml.gated_delta_net(self._context, k, k, v, g, b, s, 1)
        addresses = (a.ctypes.data for a in arrays)
        self._place(zip((k, v, g, b), addresses, strict=True))
        if state is None:
            self._zeros = np.zeros(n_numbers - first, dtype=np.float32)
            state = self._zeros.ctypes.data
        self._place([(s, state), (result, self._result.ctypes.data)])
        self._compute(result, n_threads)
        return self._result[first:n_numbers]
