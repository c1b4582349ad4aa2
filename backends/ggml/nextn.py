"""llama.cpp's functions for draft heads inside a model's file: hidden states of a pass.

They are C++ symbols of libllama (src/llama-ext.h) and may be gone in the next release, so they are
looked up by their mangled names.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np

from backends.ggml.library import LlamaError, load_library, load_shared_library

_ENABLE = "_Z26llama_set_embeddings_nextnP13llama_contextbb"
_ROWS = "_Z26llama_get_embeddings_nextnP13llama_context"


class HiddenStateFunctions:
    """Hidden states after a model's final norm, or a head's."""

    def __init__(self, enable: Any, rows: Any) -> None:
        self._enable, self._rows = enable, rows
        enable.argtypes, enable.restype = [ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool], None
        rows.argtypes, rows.restype = [ctypes.c_void_p], ctypes.POINTER(ctypes.c_float)

    def enable(self, context: Any, *, only_with_logits: bool) -> None:
        """Let passes of a context return hidden states of all tokens, or of those with logits."""
        self._enable(context, True, only_with_logits)

    def rows(self, context: Any, num_rows: int, width: int) -> np.ndarray:
        """Return the last pass's hidden states, float32 [num_rows, width], in llama.cpp's memory.

        Raises LlamaError if there are none.
        """
        pointer = self._rows(context)
        if not pointer:
            raise LlamaError("llama.cpp has no hidden states of the last pass: use a draft model")
        return np.ctypeslib.as_array(pointer, (num_rows, width))


@cache
def hidden_state_functions() -> HiddenStateFunctions:
    """Return the functions. Raises LlamaError where this llama.cpp has none."""
    library = load_shared_library()
    parameters = {field[0] for field in load_library().llama_model_params._fields_}
    if not (hasattr(library, _ENABLE) and hasattr(library, _ROWS) and "load_mtp" in parameters):
        raise LlamaError(
            "draft heads of GGUF models need llama-cpp-python 0.3.36: this version has no "
            "functions for hidden states"
        )
    return HiddenStateFunctions(getattr(library, _ENABLE), getattr(library, _ROWS))
