"""Shapes of a given size, by adjusting layers and MLP width of a well-known one.

Notation: D hidden size, F intermediate size, N layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from bench.synth.shapes import MAX_LAYERS, SHAPES, LlamaShape, Storage, SynthError
from offload.budget import format_up
from offload.units import MIB, format_bytes

_FFN_STEP = 64  # keeps rows aligned for every matmul kernel
# Layers and non-layer weights have different formats, so mean bytes per weight vary with size.
_MIN_ITERATIONS, _MAX_ITERATIONS = 3, 20
_CLOSE = 0.02


def choose_shape(
    source: LlamaShape,
    base: LlamaShape | None,
    n_bytes: int | None,
    vocab_size: int | None,
    storage: Storage,
) -> LlamaShape:
    """Return the named shape, or one of a given size; tied only if the source is.

    Adjusted widths fill whole blocks, as those of real models do.
    """
    if base is not None:
        base = replace(base, has_mtp_head=source.has_mtp_head)
    if n_bytes is None:
        assert base is not None
        return base
    if source.experts is not None or source.is_hybrid:
        if base is None:
            raise SynthError(
                "a mixture or hybrid is grown to a shape: give --like, and a size cuts its layers"
            )
        if vocab_size is not None:
            base = replace(base, vocab_size=vocab_size)
        return _with_layers(base, n_bytes, source.n_layers, storage)
    known = [base] if base else list(SHAPES.values())
    candidates = [
        replace(
            shape,
            tied=shape.tied and source.tied,
            vocab_size=shape.vocab_size if vocab_size is None else vocab_size,
        )
        for shape in known
    ]
    return shape_of_size(n_bytes, candidates, source, storage)


def shape_of_size(
    n_bytes: int, candidates: Sequence[LlamaShape], source: LlamaShape, storage: Storage
) -> LlamaShape:
    """Adjust the shape of the nearest size: its layers, then its MLP width.

    Args:
        n_bytes: size of the weights; met within a tenth.
        source: the source's shape, the minimum of layers and width.

    Raises:
        SynthError: no such model is possible; the message has the smallest size that is.
    """
    result = _adjusted(n_bytes, candidates, source, storage)
    if result is not None:
        return result
    smallest = [
        storage.model_bytes(_smallest(candidate, source, storage)) for candidate in candidates
    ]
    # In whole MiB, as in the message; another size may be nearest to another shape.
    sizes = sorted(-(-item // MIB) * MIB for item in smallest)
    possible = (
        size for size in sizes if size > n_bytes and _adjusted(size, candidates, source, storage)
    )
    minimum = next(possible, None)
    remedy = "another --like" if minimum is None else f"--size {_typed(minimum)} or more"
    if candidates[0].vocab_size > source.vocab_size:
        remedy += ", or a smaller --vocab-size"
    raise SynthError(
        f"cannot reach {format_bytes(n_bytes)} with a vocabulary of {candidates[0].vocab_size} and "
        f"the {source.n_layers} layers that the small model has: give {remedy}"
    )


def _typed(n_bytes: int) -> str:
    """Return a size as one word for a shell."""
    return format_up(n_bytes).replace(" ", "")


def _adjusted(
    n_bytes: int, candidates: Sequence[LlamaShape], source: LlamaShape, storage: Storage
) -> LlamaShape | None:
    """Return the adjusted shape; None if it is not within a tenth of `n_bytes`."""
    # Chosen once, so that the width does not change between iterations.
    nearest = min(candidates, key=lambda s: abs(math.log(storage.model_bytes(s) / max(1, n_bytes))))
    around_layers = nearest.parameters - nearest.n_layers * nearest.layer_parameters
    minimum, step = _smallest(nearest, source, storage), _width_step(nearest, storage)
    shape = nearest
    for n_done in range(_MAX_ITERATIONS):
        if n_done >= _MIN_ITERATIONS and _is_met(n_bytes, storage.model_bytes(shape), _CLOSE):
            break
        in_layers = n_bytes * shape.parameters / storage.model_bytes(shape) - around_layers
        n_layers = max(minimum.n_layers, round(in_layers / nearest.layer_parameters))
        if n_layers > MAX_LAYERS:
            raise SynthError(
                f"{format_bytes(n_bytes)} of this width are {n_layers} layers, more than "
                f"{MAX_LAYERS}: ask for less, or for a wider shape with --like"
            )
        # The rest, which may be negative, is spread over the MLPs of all layers.
        remainder = in_layers - n_layers * nearest.layer_parameters
        n_steps = round(remainder / (3 * nearest.hidden_size * n_layers) / step)
        width = max(minimum.intermediate_size, nearest.intermediate_size + n_steps * step)
        shape = replace(nearest, n_layers=n_layers, intermediate_size=width)
    return shape if _is_met(n_bytes, storage.model_bytes(shape), 0.1) else None


def _is_met(n_bytes: int, matched_bytes: int, tolerance: float) -> bool:
    return abs(matched_bytes - n_bytes) < tolerance * n_bytes


def _smallest(shape: LlamaShape, source: LlamaShape, storage: Storage) -> LlamaShape:
    """Return the shape with the minimum of layers, and of width in steps from the shape's own."""
    step = _width_step(shape, storage)
    minimum = max(step, source.intermediate_size)
    width = shape.intermediate_size - (shape.intermediate_size - minimum) // step * step
    return replace(shape, n_layers=source.n_layers, intermediate_size=width)


def _width_step(shape: LlamaShape, storage: Storage) -> int:
    """Return the step of the MLP's width."""
    return max(1, min(max(_FFN_STEP, storage.block_size), shape.intermediate_size // 4))


def _with_layers(shape: LlamaShape, n_bytes: int, min_layers: int, storage: Storage) -> LlamaShape:
    """Return the shape with the number of layers nearest to `n_bytes`; experts keep their size."""
    minimum = storage.model_bytes(replace(shape, n_layers=min_layers))
    # Layers of a NemotronH differ by a factor of 60: a step is the mean of the shape's.
    n_mean = 1 if shape.mamba is None else shape.n_layers
    layer = (storage.model_bytes(replace(shape, n_layers=min_layers + n_mean)) - minimum) / n_mean
    n_layers = min_layers + max(0, round((n_bytes - minimum) / layer))
    result = replace(shape, n_layers=n_layers)
    limit = storage.model_bytes(replace(shape, n_layers=MAX_LAYERS))
    if n_layers > MAX_LAYERS or not 0.8 * n_bytes < storage.model_bytes(result) < 1.25 * n_bytes:
        raise SynthError(
            f"cannot reach {format_bytes(n_bytes)}: a mixture's size is that of whole layers, from "
            f"{format_bytes(minimum)} ({min_layers} layers, as the small model has) to "
            f"{format_bytes(limit)} ({MAX_LAYERS} layers), in steps of {format_bytes(round(layer))}"
        )
    return result
