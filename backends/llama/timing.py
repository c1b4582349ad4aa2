"""How fast ggml multiplies on this machine: the compute half of the cost model for GGUF models.

Times one matrix product of the model's own number format through ggml's C interface, with weights
larger than the caches.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from backends.contract.curve import ComputeCurve
from backends.llama.library import load_library
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve
from offload.units import MIB

_OUT, _IN = 4096, 4096
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_LARGEST_BYTES = 4 * _OUT * _IN  # no type is wider than float32
_F32 = 0  # ggml_type of activations
_GRAPH_BYTES = 64 * MIB  # graphs, headers and results
_WORK_BYTES = 16 * MIB  # what one computation takes meanwhile


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
        self.reset = _declare(base.ggml_reset, None, pointer)
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


@cache
def measure_ggml_compute(type_id: int, n_threads: int, reading: Path | None = None) -> ComputeCurve:
    """Seconds per byte of weights of one ggml type, measured once in a process.

    reading: see `measure_curve`.
    """
    ggml = _Ggml()
    n_context_bytes = WEIGHT_BYTES + _LARGEST_BYTES + _GRAPH_BYTES
    with _context(ggml, n_context_bytes) as context, _context(ggml, _WORK_BYTES) as work:
        weights = [_zeros(ggml, context, type_id, _OUT)]
        n_bytes = ggml.n_bytes(weights[0])
        for _ in range(max(1, WEIGHT_BYTES // n_bytes - 1)):
            weights.append(_zeros(ggml, context, type_id, _OUT))
        products = {
            n: _product(ggml, _graphs(ggml, context, weights, n), work, n_threads) for n in _ROWS
        }
        return measure_curve(products, n_bytes, reading)


def _graphs(ggml: _Ggml, context: int, weights: Sequence[int], n_rows: int) -> list[int]:
    """Products with the same rows, one for each of the weights."""
    x = _zeros(ggml, context, _F32, n_rows)
    graphs = []
    for weight in weights:
        graphs.append(ggml.new_graph(context))
        ggml.expand(graphs[-1], ggml.mul_mat(context, weight, x))
    return graphs


def _product(ggml: _Ggml, graphs: Sequence[int], work: int, n_threads: int) -> Product:
    turns = itertools.cycle(graphs)

    def product() -> None:
        ggml.reset(work)  # each computation takes a new buffer there
        ggml.compute(work, next(turns), n_threads)

    return product


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
