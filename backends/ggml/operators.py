"""The few functions of ggml that single operators need, to time them and to check them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from backends.ggml.library import load_library

F32, F16, I32 = 0, 1, 26
"""Numbers of types, as in ggml.h."""


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Ggml:
    """Tensors, graphs and operators, as addresses."""

    def __init__(self) -> None:
        folder = Path(str(load_library().__file__)).parent / "lib"
        base = ctypes.CDLL(str(folder / "libggml-base.so"))
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        long, real = ctypes.c_int64, ctypes.c_float
        self.init = _declare(base.ggml_init, pointer, _InitParams)
        self.free = _declare(base.ggml_free, None, pointer)
        self.reset = _declare(base.ggml_reset, None, pointer)
        self.new_2d = _declare(base.ggml_new_tensor_2d, pointer, pointer, number, long, long)
        self.new_3d = _declare(base.ggml_new_tensor_3d, pointer, pointer, number, long, long, long)
        self.data = _declare(base.ggml_get_data, pointer, pointer)
        self.n_bytes = _declare(base.ggml_nbytes, size, pointer)
        self.mul_mat = _declare(base.ggml_mul_mat, pointer, pointer, pointer, pointer)
        self.mul_mat_id = _declare(
            base.ggml_mul_mat_id, pointer, pointer, pointer, pointer, pointer
        )
        self.attention = _declare(
            base.ggml_flash_attn_ext, pointer, *[pointer] * 5, real, real, real
        )
        self.quantize = _declare(
            base.ggml_quantize_chunk, size, number, pointer, pointer, long, long, long, pointer
        )
        self.block_size = _declare(base.ggml_blck_size, long, number)
        self.block_bytes = _declare(base.ggml_type_size, size, number)
        self.new_graph = _declare(base.ggml_new_graph, pointer, pointer)
        self.expand = _declare(base.ggml_build_forward_expand, None, pointer, pointer)
        self.compute = _declare(cpu.ggml_graph_compute_with_ctx, number, pointer, pointer, number)
        _declare(cpu.ggml_cpu_init, None)()

    @contextmanager
    def context(self, n_bytes: int) -> Iterator[int]:
        """Memory for tensors, and for what a computation takes meanwhile."""
        context = self.init(_InitParams(n_bytes, None, False))
        if not context:
            raise MemoryError(f"ggml cannot allocate {n_bytes} bytes")
        try:
            yield context
        finally:
            self.free(context)

    def tensor(self, context: int, type_id: int, shape: Sequence[int], values: np.ndarray) -> int:
        """A tensor with these bytes; the shape in numpy's order, of two or three dimensions."""
        new = self.new_2d if len(shape) == 2 else self.new_3d
        made: int = new(context, type_id, *reversed(shape))
        array = np.ascontiguousarray(values)
        if array.nbytes != self.n_bytes(made):
            raise ValueError(f"{array.nbytes} bytes for a tensor of {self.n_bytes(made)}")
        ctypes.memmove(self.data(made), array.ctypes.data, array.nbytes)
        return made

    def run(self, context: int, result: int, n_threads: int) -> np.ndarray:
        """Compute one node; its float32 values, flat."""
        graph = self.new_graph(context)
        self.expand(graph, result)
        if self.compute(context, graph, n_threads) != 0:
            raise RuntimeError("ggml did not compute a graph")
        pointer = ctypes.cast(self.data(result), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.n_bytes(result) // 4,)).copy()


@cache
def load_ggml() -> Ggml:
    """Raises LlamaError where llama.cpp is missing."""
    return Ggml()


def _declare(function: Any, result: type | None, *arguments: type) -> Any:
    function.restype, function.argtypes = result, list(arguments)
    return function
