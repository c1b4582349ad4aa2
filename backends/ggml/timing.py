"""Time ggml's matrix products on this machine, for the cost model of GGUF models.

One product per number format of the model is timed through ggml's C interface, with weights larger
than the processor's caches.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from backends.contract.curve import ComputeCurve
from backends.ggml.library import llama_version
from backends.ggml.operators import F32, Ggml, load_ggml
from backends.timing.cached import cached_curve
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve
from offload.units import MIB

_OUT, _IN = 4096, 4096
_ROWS = (1, 2, 4, 8, 16, 32, 64)
_LARGEST_BYTES = 4 * _OUT * _IN  # no type is wider than float32
_GRAPH_BYTES = 64 * MIB  # graphs, headers and results
_WORK_BYTES = 16 * MIB  # work buffer of one computation


@cache
def measure_ggml_compute(type_id: int, n_threads: int, reading: Path | None = None) -> ComputeCurve:
    """Return seconds per byte of weights of one ggml type, measured once a month.

    reading: see `measure_curve`.
    """
    what = f"llama.cpp {llama_version()} {n_threads} threads type {type_id} {_OUT}x{_IN} {_ROWS}"
    return cached_curve(what, lambda: _time_products(type_id, n_threads, reading), reading)


def _time_products(type_id: int, n_threads: int, reading: Path | None) -> ComputeCurve:
    ggml = load_ggml()
    n_context_bytes = WEIGHT_BYTES + _LARGEST_BYTES + _GRAPH_BYTES
    with ggml.context(n_context_bytes) as context, ggml.context(_WORK_BYTES) as work:
        weights = [_zeros(ggml, context, type_id, _OUT)]
        n_bytes = ggml.n_bytes(weights[0])
        for _ in range(max(1, WEIGHT_BYTES // n_bytes - 1)):
            weights.append(_zeros(ggml, context, type_id, _OUT))
        products = {
            n: _product(ggml, _graphs(ggml, context, weights, n), work, n_threads) for n in _ROWS
        }
        return measure_curve(products, n_bytes, reading)


def _graphs(ggml: Ggml, context: int, weights: Sequence[int], num_tokens: int) -> list[int]:
    """Return graphs of products of the same rows, one for each of the weights."""
    x = _zeros(ggml, context, F32, num_tokens)
    graphs = []
    for weight in weights:
        graphs.append(ggml.new_graph(context))
        ggml.expand(graphs[-1], ggml.mul_mat(context, weight, x))
    return graphs


def _product(ggml: Ggml, graphs: Sequence[int], work: int, n_threads: int) -> Product:
    turns = itertools.cycle(graphs)

    def product() -> None:
        ggml.reset(work)  # each computation allocates a new buffer there
        ggml.compute(work, next(turns), n_threads)

    return product


def _zeros(ggml: Ggml, context: int, type_id: int, num_tokens: int) -> int:
    """Return a tensor [num_tokens, _IN] of zeros."""
    tensor: int = ggml.new_2d(context, type_id, _IN, num_tokens)
    ctypes.memset(ggml.data(tensor), 0, ggml.n_bytes(tensor))
    return tensor
