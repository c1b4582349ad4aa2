"""How fast torch multiplies on this machine: the compute half of the cost model.

Measured on one matrix of the model's own dtype.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import torch

from backends.compute_profile import ComputeCurve, Product, measure_curve

_OUT, _IN = 4096, 4096
_N_WEIGHTS = 3  # together larger than the caches
_ROWS = (1, 4, 16, 64, 128)


def measure_compute(dtype: torch.dtype, reading: Path | None = None) -> ComputeCurve:
    """Seconds per byte of weights of a linear layer; `reading`: see `measure_curve`."""
    weights = [torch.ones(_OUT, _IN, dtype=dtype) for _ in range(_N_WEIGHTS)]
    products = {n: _product(weights, n) for n in _ROWS}
    with torch.inference_mode():
        return measure_curve(products, weights[0].nbytes, reading)


def _product(weights: list[torch.Tensor], n_rows: int) -> Product:
    x = torch.ones(n_rows, _IN, dtype=weights[0].dtype)
    turns = itertools.cycle(weights)
    return lambda: torch.nn.functional.linear(x, next(turns))
