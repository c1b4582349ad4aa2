"""Time whole forward passes of a model that is loaded for the measurement.

The overhead of a pass beside its products (the interpreter, starting some hundred small operations)
is negligible for a model of gigabytes, but dominates one of a few megabytes, which is timed itself.
Of a large model a few layers may be timed (backends/gguf/timed_sample.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backends.contract.backend import PREFIX
from backends.contract.curve import ComputeCurve
from backends.contract.sequence import SequenceKV
from backends.contract.source import Loading, ModelCompute, ModelSource
from backends.timing.cached import cached_curve
from backends.timing.measure import Product, measure_curve
from offload.placement.placement import Placement
from offload.placement.plan import plan_placement
from offload.units import MIB

SMALL_BYTES = 64 * MIB
"""Size above which reading and multiplying take longer than the overhead of a pass."""
_ROWS = (1, 8, 32)
_N_PREFIX = 8
_PLENTY_BYTES = 1 << 62


def is_small(source: ModelSource) -> bool:
    """Return whether the model is so small that its own passes are to be timed."""
    experts = sum(layer.n_bytes for layer in source.experts if layer is not None)
    return source.pass_bytes(1) + experts + source.non_layer_bytes <= SMALL_BYTES


def measure_small(source: ModelSource, libraries: str, **where: Any) -> ModelCompute:
    """Load a small model and time its passes, once a month for each shape.

    Args:
        libraries: versions and settings of the libraries that compute.
        where: fields of Loading for a model that is not loaded into host memory.

    Raises the errors of loading the model.
    """
    shapes = [(r.scheme or r.dtype, r.shape) for layer in source.layers for r in layer.tensors]
    experts = [(x.n_used, [r.shape for r in x.tensors[0]]) for x in source.experts if x is not None]
    kind = (
        f"{type(source).__name__} {source.exactness.min_batch_tokens} {source.head_bytes} {shapes}"
    )
    kind += f" {experts}" if experts else ""
    curve = cached_curve(
        f"{libraries} {kind} {_ROWS}",
        lambda: measure_passes(source, _ROWS, load_mode="ram", **where),
    )
    return ModelCompute(curve, source.head_bytes)


def measure_passes(
    source: ModelSource,
    rows: Sequence[int],
    *,
    reading: Path | None = None,
    placement: Placement | None = None,
    **where: Any,
) -> ComputeCurve:
    """Return seconds of passes of `rows` tokens per byte of weights, for a model in memory.

    rows: numbers of tokens to time.
    reading: see `measure_curve`.
    placement: None: all in host memory.
    where: further fields of Loading.
    """
    loading = Loading(
        placement or plan_placement(source.layers, _PLENTY_BYTES),
        max_context=min(_N_PREFIX + 1, source.max_context),
        max_nodes=max(rows),
        max_num_tokens=max(rows),
        **where,
    )
    n_prefix = loading.max_context - 1
    with source.load(loading) as backend:
        sequence = backend.new_sequence()
        if n_prefix:
            sequence.prefill([0] * n_prefix)
        passes = {n: _pass(sequence, n, n_prefix) for n in rows}
        n_bytes = {n: source.pass_bytes(n) + source.head_bytes for n in rows}
        return measure_curve(passes, n_bytes, reading)


def _pass(sequence: SequenceKV, num_tokens: int, n_prefix: int) -> Product:
    """Return a function that runs a pass over `num_tokens` sibling nodes and drops them."""

    def run() -> None:
        sequence.extend([0] * num_tokens, [PREFIX] * num_tokens)
        sequence.rollback(n_prefix)

    return run
