"""Linear layers of a CPU, by the kernels that are fast there.

A processor without AVX-512 has no kernels of torch for bf16 and fp16 but one that takes row after
row, so 16 rows take 14 times as long as one: ggml's take 4 times as long
(docs/benchmarks.md, "Products"). Both add products of such numbers in float32, in different orders;
which of them computes is a matter of the processor and the library alone, never of the rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import version
from typing import TypeAlias

import torch
from torch import nn

from backends.ggml.library import is_installed
from backends.ggml.operators import BF16, F16
from backends.ggml.products import GgmlProducts

Linear: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(x [..., n_in], weight [n_out, n_in], bias [n_out] or None) -> [..., n_out]"""
_TYPES = {torch.bfloat16: BF16, torch.float16: F16}
_SMALL_PRODUCT = 250_000
"""Multiplications (25 us) below which a second thread costs what it brings."""
_OF_THREAD = threading.local()


@cache
def torch_is_slow(dtype: torch.dtype) -> bool:
    """Whether torch has no kernels for products of many rows of such numbers on this processor."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    return dtype in supported and not supported[dtype]()


def linear_of(dtype: torch.dtype) -> Linear:
    """What computes linear layers of these numbers on this machine's CPU."""
    return _by_ggml if torch_is_slow(dtype) and is_installed() else nn.functional.linear


def slow_products(dtype: torch.dtype) -> tuple[str, ...]:
    """What to say where a library would be fast that is not there."""
    if not torch_is_slow(dtype) or is_installed():
        return ()
    name = str(dtype).removeprefix("torch.")
    return (
        f"this processor has no {name} units, and torch multiplies {name} row by row: llama.cpp's "
        "products take half the time and less, pip install 'specdec[gguf]'",
    )


def library_of(dtype: torch.dtype) -> str:
    """What `linear_of` takes, with its version: a part of all that is kept about products."""
    if linear_of(dtype) is nn.functional.linear:
        return f"torch {torch.__version__}"
    return f"llama-cpp-python {version('llama-cpp-python')}"


def sum_bytes(dtype: torch.dtype) -> int:
    """Memory of one output beside itself, until it is rounded."""
    return 0 if linear_of(dtype) is nn.functional.linear else torch.float32.itemsize


def use_fast_products(model: nn.Module, dtype: torch.dtype) -> None:
    """Let a model's linear layers be computed by what `linear_of` says, where they are on a CPU."""
    if linear_of(dtype) is nn.functional.linear:
        return
    for module in model.modules():
        if type(module) is nn.Linear:
            module.forward = partial(_forward, module)


def _forward(module: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    linear = linear_of(x.dtype) if x.is_cpu else nn.functional.linear
    return linear(x, module.weight, module.bias)


def tried_linear_of(dtype: torch.dtype) -> Linear:
    """The same as `linear_of`, before its sums are rounded, where they can be had: rounding hides
    most of what differs. And with any number of threads that it may take."""
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
        raise RuntimeError(  # as torch does: ggml would compute with whatever lies there
            f"rows of {x.shape[-1]} numbers in {x.dtype} do not fit a matrix {tuple(weight.shape)} "
            f"in {weight.dtype} on {weight.device}"
        )
    if not x.is_contiguous():
        x = x.contiguous()
    if not weight.is_contiguous():
        weight = weight.contiguous()
    result = torch.empty(*x.shape[:-1], n_out, dtype=torch.float32)  # whatever torch's default is
    addresses = weight.data_ptr(), x.data_ptr(), result.data_ptr()
    shape = x.numel() // n_in, n_in, n_out
    if result.numel():  # ggml ends the process where there is no row
        _products().multiply(_TYPES[weight.dtype], *addresses, shape, n_threads)
    if bias is not None:
        result += bias
    return result


def _products() -> GgmlProducts:
    """This thread's: models that run at the same time do so in threads of their own."""
    products: GgmlProducts | None = getattr(_OF_THREAD, "products", None)
    if products is None:
        products = _OF_THREAD.products = GgmlProducts()
    return products
