"""Linear layers on a CPU, computed by the fastest kernels available.

On a processor without AVX-512, torch computes bf16 and fp16 products row by row, so 16 rows take 14
times as long as one: with ggml they take 4 times as long (docs/benchmarks.md, "Products"). Both sum
in float32, in different orders; the choice depends on the processor and the installed libraries
alone, never on the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import Any, TypeAlias

import torch
from torch import nn

from backends.ggml.library import is_installed
from backends.ggml.operators import BF16, F16
from backends.ggml.products import GgmlProducts
from offload.distribution import install_command

Linear: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., n_in], weight [n_out, n_in], bias [n_out] or None) -> [..., n_out]"""
_TYPES = {torch.bfloat16: BF16, torch.float16: F16}
_SMALL_PRODUCT = 250_000
"""Multiplications (25 us) below which a second thread costs as much as it saves."""
MIN_OUTPUTS = 16
"""Outputs to compute of a layer with a single one, as the gate of a shared expert: kernels for one
output are not batch-invariant."""
_thread_local = threading.local()


@cache
def torch_is_slow(dtype: torch.dtype) -> bool:
    """Return whether torch lacks kernels for many rows of this dtype on this processor."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()


def linear_of(dtype: torch.dtype) -> Linear:
    """Return the function that computes linear layers of this dtype on this machine's CPU."""
    return _by_ggml if torch_is_slow(dtype) and is_installed() else nn.functional.linear


def linear_of_device(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Compute a linear layer on the device of x [..., n_in], by `linear_of` on a CPU."""
    linear = linear_of(x.dtype) if x.is_cpu else nn.functional.linear
    return linear(x, weight, bias)


def slow_products(dtype: torch.dtype) -> tuple[str, ...]:
    """Return a warning if products are slow for lack of a library that could be installed."""
    if not torch_is_slow(dtype) or is_installed():
        return ()
    name = str(dtype).removeprefix("torch.")
    return (
        f"this processor has no {name} units, and torch multiplies {name} row by row: llama.cpp's "
        f"products take half the time and less, {install_command('gguf')}",
    )


def library_of(dtype: torch.dtype) -> str:
    """Return the library of `linear_of` and its version: part of the keys in the disk cache."""
    if linear_of(dtype) is nn.functional.linear:
        return f"torch {torch.__version__}"
    return f"llama-cpp-python {version('llama-cpp-python')}"


def sum_bytes(dtype: torch.dtype) -> int:
    """Return the temporary bytes per output: its float32 sum before it is rounded."""
    return 0 if linear_of(dtype) is nn.functional.linear else torch.float32.itemsize


def use_fast_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Make a model's linear layers use `linear_of` on a CPU, and compute MIN_OUTPUTS or more."""
    is_fast = linear_of(dtype) is nn.functional.linear
    for module in model.modules():
        if is_plain(module) and (not is_fast or module.out_features == 1):
            module.forward = partial(_forward, module)


def is_plain(module: nn.Module) -> bool:
    """Return whether a module computes a linear layer and nothing else."""
    return type(module) is nn.Linear or type(module).__name__ == "FalconLinear"


def _forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.out_features > 1 or not x.is_cpu:
        return linear_of_device(x, module.weight, module.bias)
    bias = None if module.bias is None else module.bias.repeat(MIN_OUTPUTS)
    return linear_of_device(x, module.weight.repeat(MIN_OUTPUTS, 1), bias)[..., :1]


def tried_linear_of(dtype: torch.dtype) -> Linear:
    """Return `linear_of` for tests: without rounding of its sums if possible, since rounding hides
    most differences, and with each number of threads that it may use."""
    linear = linear_of(dtype)
    return _tried_sums if linear is _by_ggml else linear


def _by_ggml(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    is_small = x.numel() * len(weight) < _SMALL_PRODUCT
    n_threads = 1 if is_small else torch.get_num_threads()
    return _sums_of_ggml(x, weight, bias, n_threads).to(x.dtype)


def _tried_sums(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    num_rows = x.numel() // x.shape[-1]
    return _sums_of_ggml(x, weight, bias, torch.get_num_threads() if num_rows % 2 else 1)


def _sums_of_ggml(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n_threads: int
) -> torch.Tensor:
    n_out, n_in = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != n_in or not weight.is_cpu:
        raise RuntimeError(  # as torch does: ggml would read out of bounds
            f"rows of {x.shape[-1]} numbers in {x.dtype} do not fit a matrix {tuple(weight.shape)} "
            f"in {weight.dtype} on {weight.device}"
        )
    if not x.is_contiguous():
        x = x.contiguous()
    if not weight.is_contiguous():
        weight = weight.contiguous()
    sums = torch.empty(*x.shape[:-1], n_out, dtype=torch.float32)  # whatever torch's default is
    addresses = weight.data_ptr(), x.data_ptr(), sums.data_ptr()
    shape = x.numel() // n_in, n_in, n_out
    if sums.numel():  # ggml ends the process if there is no row
        _products().multiply(_TYPES[weight.dtype], *addresses, shape, n_threads)
    if bias is not None:
        sums += bias
    return sums


def _products() -> GgmlProducts:
    """Return this thread's instance: models that run concurrently do so in different threads."""
    products: GgmlProducts | None = getattr(_thread_local, "products", None)
    if products is None:
        products = _thread_local.products = GgmlProducts()
    return products
