"""Speed of torch's matrix products on this machine: the compute half of the cost model.

Measured on one matrix of the model's dtype.
"""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import torch

from backends.contract.curve import ComputeCurve
from backends.feedforward.linear import library_of, linear_of
from backends.timing.cached import cached_curve
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve

_OUT, _IN = 2048, 4096
_ROWS = (1, 4, 16, 64, 128)
_GPU_OUT, _GPU_IN = 8192, 4096
"""Larger than on a CPU: a kernel launch takes as long as reading tens of MB, and a layer's matrices
are large too."""
_GPU_ROWS = (*_ROWS, 512, 1024)


def measure_compute(dtype: torch.dtype, reading: Path | None = None) -> ComputeCurve:
    """Return seconds per byte of weights of a linear layer, measured once a month.

    reading: see `measure_curve`.
    """
    return _measure(dtype, reading, torch.get_num_threads())


@cache
def _measure(dtype: torch.dtype, reading: Path | None, n_threads: int) -> ComputeCurve:
    key = f"{library_of(dtype)} {n_threads} threads {dtype} {_OUT}x{_IN} {_ROWS}"
    return cached_curve(key, lambda: _time_products(dtype, reading), reading)


def _time_products(dtype: torch.dtype, reading: Path | None) -> ComputeCurve:
    first = torch.ones(_OUT, _IN, dtype=dtype)
    weights = [first, *(first.clone() for _ in range(max(1, WEIGHT_BYTES // first.nbytes - 1)))]
    products = {n: _product(weights, n) for n in _ROWS}
    with torch.inference_mode():
        return measure_curve(products, first.nbytes, reading)


@cache
def measure_gpu_compute(dtype: torch.dtype, device: torch.device) -> ComputeCurve:
    """Return the same for a GPU, whose speed does not depend on reads from storage."""
    name = torch.cuda.get_device_name(device)
    key = f"torch {torch.__version__} {name} {dtype} {_GPU_OUT}x{_GPU_IN} {_GPU_ROWS}"
    return cached_curve(key, lambda: _time_gpu_products(dtype, device))


def _time_gpu_products(dtype: torch.dtype, device: torch.device) -> ComputeCurve:
    """Time products, waiting for each as a pass waits for its logits."""
    weights = [torch.ones(_GPU_OUT, _GPU_IN, dtype=dtype, device=device) for _ in range(2)]

    def waited_for(product: Product) -> Product:
        def run() -> None:
            product()
            torch.cuda.synchronize(device)

        return run

    products = {n: waited_for(_product(weights, n)) for n in _GPU_ROWS}
    with torch.inference_mode():
        return measure_curve(products, weights[0].nbytes)


def _product(weights: list[torch.Tensor], num_tokens: int) -> Product:
    """Return a product with a norm and an activation: a decoder layer has about as many small
    operations per byte of its weights."""
    x = torch.ones(
        num_tokens, weights[0].shape[1], dtype=weights[0].dtype, device=weights[0].device
    )
    turns = itertools.cycle(weights)
    linear = linear_of(x.dtype) if x.device.type == "cpu" else torch.nn.functional.linear

    def product() -> torch.Tensor:
        y = linear(x, next(turns), None)
        wide = y.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.nn.functional.silu((wide * scale).to(y.dtype)) * y

    return product
