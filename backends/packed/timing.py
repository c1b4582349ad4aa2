"""Speed of products with packed tensors on this machine, measured once and cached on disk."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from backends.contract.curve import ComputeCurve
from backends.packed.codec import example, example_bytes
from backends.packed.decoder import Decoder, PackedModule
from backends.packed.device import DeviceDecoder
from backends.packed.tensor import PackedTensor
from backends.timing.cached import cached_curve
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve

_REVISION = 3
"""Version of the decoding code and its timing: cached results of another version are discarded."""
_SHAPE = 2048, 4096
"""Shape of the matrix that is multiplied: larger than the processor's caches."""
_ROWS = (1, 4, 16, 64, 128)


def measure_products(scheme: str, n_threads: int, reading: Path | None = None) -> ComputeCurve:
    """Return seconds per stored byte of products with matrices of a scheme; see `measure_curve`."""
    return _measure(scheme, n_threads, reading)


@cache
def _measure(scheme: str, n_threads: int, reading: Path | None) -> ComputeCurve:
    key = _key(f"products {_ROWS}", scheme, n_threads)
    return cached_curve(key, lambda: _time(scheme, n_threads, reading), reading)


@cache
def measure_decoding(scheme: str, n_threads: int) -> ComputeCurve:
    """Return seconds per stored byte of decoding whole matrices, equal for any number of tokens."""
    key = _key("decode", scheme, n_threads)
    return cached_curve(key, lambda: _time_decoding(scheme, n_threads))


def _key(what: str, scheme: str, n_threads: int) -> str:
    """Return the cache key: everything that the time depends on."""
    libraries = f"numba {version('numba')} torch {torch.__version__}"
    return f"{what} {scheme} {_REVISION} {libraries} {n_threads} threads {_SHAPE}"


@cache
def measure_gpu_decoding(scheme: str, device: torch.device) -> ComputeCurve:
    """Return the same for a GPU."""
    name = torch.cuda.get_device_name(device)
    key = f"decode {scheme} {_REVISION} torch {torch.__version__} {name} {_SHAPE}"
    return cached_curve(key, lambda: _time_on_device(scheme, device))


def _time_on_device(scheme: str, device: torch.device) -> ComputeCurve:
    tensor = example(scheme, _SHAPE)
    stored = example_bytes(tensor, device)
    decoding = DeviceDecoder(
        [PackedModule((tensor,))],
        lambda n_bytes: torch.empty(n_bytes, dtype=torch.uint8, device=device),
    )

    def decode() -> None:
        decoded = decoding.decode([tensor], [stored])
        decoded[0].view(-1)[0].item()  # waits

    with torch.inference_mode():
        return measure_curve({1: decode}, tensor.record.n_bytes)


def _time(scheme: str, n_threads: int, reading: Path | None) -> ComputeCurve:
    tensor = example(scheme, _SHAPE)
    turns = _turns(tensor)
    decoder = Decoder([PackedModule((tensor,), is_multiplied=True)], n_threads)

    def product(num_tokens: int) -> Product:
        x = torch.ones(num_tokens, _SHAPE[1], dtype=torch.bfloat16)
        return lambda: decoder.multiply(tensor, next(turns), x, None)

    try:
        with torch.inference_mode():
            return measure_curve({n: product(n) for n in _ROWS}, tensor.record.n_bytes, reading)
    finally:
        decoder.close()


def _time_decoding(scheme: str, n_threads: int) -> ComputeCurve:
    tensor = example(scheme, _SHAPE)
    turns = _turns(tensor)
    decoder = Decoder([PackedModule((tensor,))], n_threads)
    try:
        with torch.inference_mode():
            products: dict[int, Product] = {1: lambda: decoder.decode([tensor], [next(turns)])}
            return measure_curve(products, tensor.record.n_bytes)
    finally:
        decoder.close()


def _turns(tensor: PackedTensor) -> Iterator[list[torch.Tensor]]:
    """Return contents of a matrix in turn, more than the processor's caches hold."""
    n_copies = max(2, WEIGHT_BYTES // tensor.record.n_bytes)
    return itertools.cycle([example_bytes(tensor) for _ in range(n_copies)])
