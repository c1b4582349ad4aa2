"""How this machine's arithmetic is measured: products of several numbers of rows, timed.

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
"""Of the weights that products take in turn: more than the processor's caches hold."""
_MIN_SECONDS = 0.02
"""Of products of one size: a longer one counts by itself, and what starting it takes is little of
it."""
_MINOR_SHARE = 0.01
"""Formats with less than this share of the matrices' bytes are not worth measuring."""


def matrix_formats(records: Iterable[TensorRecord]) -> tuple[str, ...]:
    """The number formats of a model's matrices, the most used first; traces are left out."""
    n_bytes: dict[str, int] = {}
    for record in records:
        if len(record.shape) >= 2:
            n_bytes[record.dtype] = n_bytes.get(record.dtype, 0) + record.n_bytes
    minimum = _MINOR_SHARE * sum(n_bytes.values())
    return tuple(sorted((f for f in n_bytes if n_bytes[f] >= minimum), key=lambda f: -n_bytes[f]))


Product = Callable[[], object]
"""Multiplies once; each call takes other weights, so that none stay in the processor's caches."""


def measure_curve(
    products: dict[int, Product],
    n_bytes: float | Mapping[int, float],
    reading: Path | None = None,
) -> ComputeCurve:
    """Seconds per byte of weights.

    Args:
        products: by their rows.
        n_bytes: of the weights of one product, or of each by its rows.
        reading: a weight file that is read meanwhile, for the second figure; the first one is taken
            for both where there is none, or it is too small to be read for long.

    How many times as long products take beside reads hardly depends on their rows: timed with the
    fewest, the most, and some between.
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
    """Median over some time; of several products the first one warms up and does not count."""
    taken: list[float] = []
    while sum(taken) < _MIN_SECONDS:
        started = time.perf_counter()
        product()
        taken.append(time.perf_counter() - started)
    return statistics.median(taken[1:] or taken)
