"""How fast this machine multiplies: the compute half of the cost model.

A pass over N rows of a layer costs about a + b*N seconds per byte of weights: a is reading the
weights from memory, b the arithmetic. Measured on one matrix of the model's own dtype.
"""

from __future__ import annotations

import time

import torch

from backends.compute_profile import ComputeProfile

_OUT, _IN = 4096, 4096
_ROWS = (1, 64)
_REPEATS = 5


def measure_compute(dtype: torch.dtype) -> ComputeProfile:
    """Time a linear layer with 1 and 64 rows, over weights larger than the caches."""
    weights = [torch.ones(_OUT, _IN, dtype=dtype) for _ in range(3)]
    n_bytes = weights[0].nbytes
    one, many = (_fastest_seconds(weights, rows) / n_bytes for rows in _ROWS)
    slope = max(many - one, one * 1e-3) / (_ROWS[1] - _ROWS[0])
    return ComputeProfile(max(one - slope, 0.0), slope)


def _fastest_seconds(weights: list[torch.Tensor], n_rows: int) -> float:
    x = torch.ones(n_rows, _IN, dtype=weights[0].dtype)
    best = float("inf")
    for repeat in range(_REPEATS):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weights[repeat % len(weights)])
        best = min(best, time.perf_counter() - started)
    return best
