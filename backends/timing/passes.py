"""A model's passes, timed as they are: it is loaded for a moment and run.

What a pass takes beside its products (the interpreter, starting some hundred small operations) is
nothing for a model of gigabytes and nearly all for one of a few megabytes, which is timed itself.
Of a large one a few layers may be (backends/gguf/timed_sample.py).
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
"""Larger models take longer to read and to multiply with than all the rest of a pass, at least."""
_ROWS = (1, 8, 32)
_N_PREFIX = 8
_PLENTY_BYTES = 1 << 62


def is_small(source: ModelSource) -> bool:
    """Whether the model is to be timed itself."""
    experts = sum(layer.n_bytes for layer in source.experts if layer is not None)
    return source.pass_bytes(1) + experts + source.non_layer_bytes <= SMALL_BYTES


def measure_small(source: ModelSource, libraries: str, **where: Any) -> ModelCompute:
    """Passes of a small model that is loaded for that, once in a month for each shape.

    Args:
        libraries: versions and settings of what computes.
        where: fields of the Loading of a model that is not loaded into host memory.

    Raises what loading the model raises.
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
    """Seconds of passes of these rows, per byte of the weights of a model that fits in memory.

    reading: see `measure_curve`.
    residency: None: all in host memory.
    where: further fields of the Loading.
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
    """A level of a tree: so many nodes next to each other."""

    def run() -> None:
        sequence.extend([0] * num_tokens, [PREFIX] * num_tokens)
        sequence.rollback(n_prefix)

    return run
