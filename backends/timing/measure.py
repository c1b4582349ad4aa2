"""Time this machine's matrix products for several numbers of tokens.

While storage is read the same product takes longer, by up to twice on a virtual machine whose disk
is served by the processors that compute. Streamed passes compute beside reads nearly all the time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from backends.contract.curve import ComputeCurve
from offload.formats.tensors import TensorRecord
from offload.ring.bandwidth import busy_storage, is_measurable
from offload.units import MIB

WEIGHT_BYTES = 64 * MIB
"""Bytes of the weights that products use in turn: more than the processor's caches hold."""
_MIN_SECONDS = 0.02
"""Minimum seconds to repeat a product for; of a longer one a single run is enough, since the
overhead of starting it is small."""
_MINOR_SHARE = 0.01
"""Share of the matrices' bytes below which a format is not measured."""


def matrix_formats(records: Iterable[TensorRecord]) -> tuple[str, ...]:
    """Return the number formats of a model's matrices, the most used first, minor ones left out."""
    n_bytes: dict[str, int] = {}
    for record in records:
        if len(record.shape) >= 2:
            n_bytes[record.dtype] = n_bytes.get(record.dtype, 0) + record.n_bytes
    minimum = _MINOR_SHARE * sum(n_bytes.values())
    return tuple(sorted((f for f in n_bytes if n_bytes[f] >= minimum), key=lambda f: -n_bytes[f]))


Product = Callable[[], object]
"""Function that multiplies once, each time by other weights, so that none stay in the caches."""


def measure_curve(
    products: dict[int, Product],
    n_bytes: float | Mapping[int, float],
    reading: Path | None = None,
) -> ComputeCurve:
    """Return seconds per byte of weights.

    The slowdown beside reads hardly depends on the number of tokens: it is timed at the minimum,
    the maximum and the middle, and interpolated.

    Args:
        products: by their number of tokens.
        n_bytes: bytes of the weights of a product, or by its number of tokens.
        reading: a weight file to read meanwhile, for `beside_reads`; without one, or with one too
            small to be read for long, these equal the times alone.
    """
    rows = tuple(sorted(products))
    sizes = n_bytes if isinstance(n_bytes, Mapping) else dict.fromkeys(rows, n_bytes)

    def sweep(of: Sequence[int]) -> tuple[float, ...]:
        return tuple(_typical_seconds(products[n]) / sizes[n] for n in of)

    alone = sweep(rows)
    if reading is None or not is_measurable(reading):
        return ComputeCurve(rows, alone, alone)
    few = sorted({rows[0], rows[len(rows) // 2], rows[-1]})
    with busy_storage(reading):
        beside = sweep(few)
    factors = np.divide(beside, [alone[rows.index(n)] for n in few])
    between = np.interp(rows, few, factors)
    return ComputeCurve(rows, alone, tuple((np.array(alone) * between).tolist()))


def _typical_seconds(product: Product) -> float:
    """Return the median of repeated runs; the first one is a warm-up, unless it is the only one."""
    taken: list[float] = []
    while sum(taken) < _MIN_SECONDS:
        started = time.perf_counter()
        product()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:] or taken)
