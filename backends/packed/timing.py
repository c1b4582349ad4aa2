"""Speed of decoding packed tensors on this machine, measured once and cached on disk."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

import torch

from backends.contract.curve import ComputeCurve
from backends.packed import decoder
from backends.packed.codec import example, example_bytes
from backends.packed.decoder import Decoder, PackedModule
from backends.packed.device import DeviceDecoder
from backends.packed.kernels import fastest_kernels
from backends.packed.twelve_bits import TwelveBits
from backends.timing.cached import cached_curve
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve

_REVISION = 2
"""Version of the decoding code and its timing: cached results of another version are discarded."""
_SHAPE = 2048, 4096
"""Shape of the matrix that is decoded: larger than the processor's caches."""


def measure_decoding(scheme: str, n_threads: int, reading: Path | None = None) -> ComputeCurve:
    """Return seconds per stored byte, equal for any number of tokens; see `measure_curve`."""
    return _measure(scheme, n_threads, reading)


@cache
def _measure(scheme: str, n_threads: int, reading: Path | None) -> ComputeCurve:
    return cached_curve(_key(scheme, n_threads), lambda: _time(scheme, n_threads, reading), reading)


def _key(scheme: str, n_threads: int) -> str:
    """Return the cache key: everything that the time depends on."""
    by = f"torch {torch.__version__}"
    if scheme == TwelveBits.name:  # the others are decoded by torch alone
        by += " " + fastest_kernels().__name__.rpartition(".")[2]
    pieces = f"pieces of {decoder.PIECE_BYTES}"
    return f"decode {scheme} {_REVISION} {by} {pieces} {n_threads} threads {_SHAPE}"


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
    n_bytes = tensor.record.n_bytes
    stored = [example_bytes(tensor) for _ in range(max(2, WEIGHT_BYTES // n_bytes))]
    turns = itertools.cycle(stored)
    decoding = Decoder([PackedModule((tensor,), in_pieces=True)], n_threads)

    def decode() -> None:
        for _ in decoding.decode_pieces(tensor, next(turns)):
            pass

    try:
        products: dict[int, Product] = {1: decode}
        with torch.inference_mode():
            return measure_curve(products, n_bytes, reading)
    finally:
        decoding.close()
