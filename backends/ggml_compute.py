"""How fast ggml multiplies on this machine: the compute half of the cost model for GGUF models.

Times one matrix product of the model's own number format through ggml's C interface, with weights
larger than the caches. As in `backends.compute`, a product with N rows takes a + b*N seconds for
every byte of weights.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from backends.compute_profile import ComputeProfile
from backends.llama_lib import load_library
from offload.units import MIB

_OUT, _IN = 4096, 4096
_N_WEIGHTS = 3
_ROWS = (1, 16)
_REPEATS = 5
_F32 = 0  # ggml_type of activations
_GRAPH_BYTES = 16 * MIB  # the graph, its tensors' headers and the work buffer


class _InitParams(ctypes.Structure):
    """struct ggml_init_params."""

    _fields_ = (
        ("mem_size", ctypes.c_size_t),
        ("mem_buffer", ctypes.c_void_p),
        ("no_alloc", ctypes.c_bool),
    )


class _Ggml:
    """The few functions of ggml that a matrix product needs."""

    def __init__(self) -> None:
        folder = Path(str(load_library().__file__)).parent / "lib"
        base = ctypes.CDLL(str(folder / "libggml-base.so"))
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        self.init = _declare(base.ggml_init, pointer, _InitParams)
        self.free = _declare(base.ggml_free, None, pointer)
        self.new_2d = _declare(
            base.ggml_new_tensor_2d, pointer, pointer, number, ctypes.c_int64, ctypes.c_int64
        )
        self.data = _declare(base.ggml_get_data, pointer, pointer)
        self.n_bytes = _declare(base.ggml_nbytes, size, pointer)
        self.mul_mat = _declare(base.ggml_mul_mat, pointer, pointer, pointer, pointer)
        self.new_graph = _declare(base.ggml_new_graph, pointer, pointer)
        self.expand = _declare(base.ggml_build_forward_expand, None, pointer, pointer)
        self.compute = _declare(cpu.ggml_graph_compute_with_ctx, number, pointer, pointer, number)


def _declare(function: ctypes._NamedFuncPointer, result: type | None, *arguments: type):  # type: ignore[no-untyped-def]
    function.restype, function.argtypes = result, list(arguments)
    return function


def measure_ggml_compute(type_id: int, n_threads: int) -> ComputeProfile:
    """Time products with weights of one ggml type; about a tenth of a second."""
    ggml = _Ggml()
    (one, n_bytes), (many, _) = (_fastest_seconds(ggml, type_id, r, n_threads) for r in _ROWS)
    slope = max(many - one, one * 1e-3) / (_ROWS[1] - _ROWS[0])
    return ComputeProfile(max(one - slope, 0.0) / n_bytes, slope / n_bytes)


def _fastest_seconds(ggml: _Ggml, type_id: int, n_rows: int, n_threads: int) -> tuple[float, int]:
    """(seconds of the fastest product, bytes of its weights)."""
    n_bytes = 4 * _OUT * _IN  # no type is wider than float32
    with _context(ggml, _N_WEIGHTS * n_bytes + _GRAPH_BYTES) as context:
        weights = [_zeros(ggml, context, type_id, _OUT) for _ in range(_N_WEIGHTS)]
        x = _zeros(ggml, context, _F32, n_rows)
        graphs = []
        for weight in weights:
            graphs.append(ggml.new_graph(context))
            ggml.expand(graphs[-1], ggml.mul_mat(context, weight, x))
        best = float("inf")
        for repeat in range(_REPEATS):
            started = time.perf_counter()
            ggml.compute(context, graphs[repeat % _N_WEIGHTS], n_threads)
            best = min(best, time.perf_counter() - started)
        return best, ggml.n_bytes(weights[0])


@contextmanager
def _context(ggml: _Ggml, n_bytes: int) -> Iterator[int]:
    context = ggml.init(_InitParams(n_bytes, None, False))
    if not context:
        raise MemoryError(f"ggml cannot allocate {n_bytes} bytes to time a product")
    try:
        yield context
    finally:
        ggml.free(context)


def _zeros(ggml: _Ggml, context: int, type_id: int, n_rows: int) -> int:
    """A tensor [n_rows, _IN] of zeros."""
    tensor: int = ggml.new_2d(context, type_id, _IN, n_rows)
    ctypes.memset(ggml.data(tensor), 0, ggml.n_bytes(tensor))
    return tensor
