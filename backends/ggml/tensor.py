"""ggml_tensor, the node of ggml's graphs, read in place."""

from __future__ import annotations

import ctypes

F32 = 0
"""Type number of float32, as in ggml.h."""
NO_WORK = frozenset((b"NONE", b"RESHAPE", b"VIEW", b"PERMUTE", b"TRANSPOSE"))
"""Operators that compute nothing."""


class Tensor(ctypes.Structure):
    """Head of ggml_tensor in ggml.h; `GraphReader` compares it with ggml's own accessors."""

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
