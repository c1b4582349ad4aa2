"""ctypes declarations of the ggml functions that single operators need."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from backends.ggml.library import LlamaError, load_shared_library

F32, F16, I32, BF16 = 0, 1, 26, 30
"""Type numbers, as in ggml.h."""


class InitParams(ctypes.Structure):
    """ggml_init_params in ggml.h."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class Ggml:
    """Functions of ggml; tensors, graphs and contexts are addresses."""

    def __init__(self) -> None:
        ggml = load_shared_library()
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        long, real = ctypes.c_int64, ctypes.c_float
        self.init = declare(ggml.ggml_init, pointer, InitParams)
        self.free = declare(ggml.ggml_free, None, pointer)
        self.reset = declare(ggml.ggml_reset, None, pointer)
        self.new_2d = declare(ggml.ggml_new_tensor_2d, pointer, pointer, number, long, long)
        self.new_3d = declare(ggml.ggml_new_tensor_3d, pointer, pointer, number, long, long, long)
        self.data = declare(ggml.ggml_get_data, pointer, pointer)
        self.n_bytes = declare(ggml.ggml_nbytes, size, pointer)
        self.mul_mat = declare(ggml.ggml_mul_mat, pointer, pointer, pointer, pointer)
        self.mul_mat_id = declare(ggml.ggml_mul_mat_id, pointer, pointer, pointer, pointer, pointer)
        self.attention = declare(
            ggml.ggml_flash_attn_ext, pointer, *[pointer] * 5, real, real, real
        )
        self.gated_delta_net = declare(
            ggml.ggml_gated_delta_net, pointer, *[pointer] * 7, ctypes.c_int64
        )
        self.quantize = declare(
            ggml.ggml_quantize_chunk, size, number, pointer, pointer, long, long, long, pointer
        )
        self.block_size = declare(ggml.ggml_blck_size, long, number)
        self.block_bytes = declare(ggml.ggml_type_size, size, number)
        self.new_graph = declare(ggml.ggml_new_graph, pointer, pointer)
        self.new_small_graph = declare(
            ggml.ggml_new_graph_custom, pointer, pointer, size, ctypes.c_bool
        )
        self.expand = declare(ggml.ggml_build_forward_expand, None, pointer, pointer)
        self.compute = declare(ggml.ggml_graph_compute_with_ctx, number, pointer, pointer, number)
        declare(ggml.ggml_cpu_init, None)()
        # For tensors in memory that ggml has not allocated.
        self.buffer_from_ptr = declare(
            ggml.ggml_backend_cpu_buffer_from_ptr, pointer, pointer, size
        )
        self.buffer_free = declare(ggml.ggml_backend_buffer_free, None, pointer)
        self.tensor_alloc = declare(
            ggml.ggml_backend_tensor_alloc, number, pointer, pointer, pointer
        )
        self.backend_init = declare(ggml.ggml_backend_cpu_init, pointer)
        self.backend_free = declare(ggml.ggml_backend_free, None, pointer)
        self.set_n_threads = declare(ggml.ggml_backend_cpu_set_n_threads, None, pointer, number)
        self.backend_compute = declare(ggml.ggml_backend_graph_compute, number, pointer, pointer)

    @contextmanager
    def context(self, n_bytes: int) -> Iterator[int]:
        """Allocate memory for tensors and for the work buffers of computations."""
        context = self.init(InitParams(n_bytes, None, False))
        if not context:
            raise MemoryError(f"ggml cannot allocate {n_bytes} bytes")
        try:
            yield context
        finally:
            self.free(context)

    def tensor(self, context: int, type_id: int, shape: Sequence[int], values: np.ndarray) -> int:
        """Return a tensor with these bytes; shape in numpy's order, of two or three dimensions."""
        new = self.new_2d if len(shape) == 2 else self.new_3d
        made: int = new(context, type_id, *reversed(shape))
        array = np.ascontiguousarray(values)
        if array.nbytes != self.n_bytes(made):
            raise ValueError(f"{array.nbytes} bytes for a tensor of {self.n_bytes(made)}")
        ctypes.memmove(self.data(made), array.ctypes.data, array.nbytes)
        return made

    def run(self, context: int, result: int, n_threads: int) -> np.ndarray:
        """Compute one node; return its float32 values, flat."""
        graph = self.new_graph(context)
        self.expand(graph, result)
        if self.compute(context, graph, n_threads) != 0:
            raise RuntimeError("ggml did not compute a graph")
        pointer = ctypes.cast(self.data(result), ctypes.POINTER(ctypes.c_float))
        return np.ctypeslib.as_array(pointer, (self.n_bytes(result) // 4,)).copy()


@cache
def load_ggml() -> Ggml:
    """Return ggml's functions. Raises LlamaError if llama.cpp is missing or lacks one of them."""
    try:
        return Ggml()
    except (OSError, AttributeError) as error:
        raise LlamaError(
            f"this llama-cpp-python does not fit ({error}): pip install --upgrade llama-cpp-python"
        ) from error


def declare(function: Any, result: type | None, *arguments: type) -> Any:
    function.restype, function.argtypes = result, list(arguments)
    return function
