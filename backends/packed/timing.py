"""How fast this machine decodes packed tensors: measured once, kept like its products."""

from __future__ import annotations

import itertools
from functools import cache
from pathlib import Path

from backends.contract.curve import ComputeCurve
from backends.packed.codec import CODECS
from backends.packed.kernels import fastest_kernels
from backends.packed.layers import LayerDecoder
from backends.timing.kept import kept_curve
from backends.timing.measure import WEIGHT_BYTES, Product, measure_curve
from offload.formats.tensors import TensorRecord

_N_WEIGHTS = 8 << 20
"""Of the layer that is decoded: more than the processor's caches hold."""


def measure_decoding(scheme: str, n_threads: int, reading: Path | None = None) -> ComputeCurve:
    """Seconds per stored byte, the same for any number of rows; see `measure_curve`."""
    return _measure(scheme, n_threads, reading)


@cache
def _measure(scheme: str, n_threads: int, reading: Path | None) -> ComputeCurve:
    kernels = fastest_kernels().__name__.rpartition(".")[2]
    what = f"decode {scheme} {kernels} {n_threads} threads {_N_WEIGHTS}"
    return kept_curve(what, lambda: _time(scheme, n_threads, reading), reading)


def _time(scheme: str, n_threads: int, reading: Path | None) -> ComputeCurve:
    codec = CODECS[scheme]
    n_bytes = codec.least_bytes(_N_WEIGHTS)
    record = TensorRecord("", codec.number_format, (_N_WEIGHTS,), Path(), 0, n_bytes, scheme)
    stored = [
        {record.name: memoryview(bytearray(n_bytes))}
        for _ in range(max(2, WEIGHT_BYTES // n_bytes))
    ]
    turns = itertools.cycle(stored)
    decoder = LayerDecoder([[record]], n_threads)
    try:
        products: dict[int, Product] = {1: lambda: decoder.decode(0, next(turns))}
        return measure_curve(products, n_bytes, reading)
    finally:
        decoder.close()
