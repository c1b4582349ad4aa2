"""Shapes of a wished size: layers and MLP width of a well-known one are adjusted.

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
# Formats differ between layers and around them, so a weight's mean bytes change with the size.
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 20
_CLOSE = 0.02


def choose_shape(
    source: LlamaShape,
    base: LlamaShape | None,
    n_bytes: int | None,
    vocab_size: int | None,
    storage: Storage,
) -> LlamaShape:
    """The shape named, or adjusted to a size; tied only if the source is, so sizes are right.

    Adjusted widths fill whole blocks, as those of the models that people have do.
    """
    if n_bytes is None:
        assert base is not None
        return base
    if source.experts is not None:
        if base is None:
            raise SynthError(
                "a mixture is grown to a shape: give --like, and a size cuts its layers"
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
    """Adjusts the shape of the nearest size: its layers, then its MLP width.

    Args:
        n_bytes: the wished size of the weights; met within a tenth.
        source: has the least layers and the least width.

    Raises:
        SynthError: no such model is possible; the message has the least size that is.
    """
    result = _adjusted(n_bytes, candidates, source, storage)
    if result is not None:
        return result
    smallest = [
        storage.model_bytes(_smallest(candidate, source, storage)) for candidate in candidates
    ]
    # In whole MiB, which is what the message has; another size may be nearest to another shape.
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
    """One word in a shell."""
    return format_up(n_bytes).replace(" ", "")


def _adjusted(
    n_bytes: int, candidates: Sequence[LlamaShape], source: LlamaShape, storage: Storage
) -> LlamaShape | None:
    """None where the result is not within a tenth of `n_bytes`."""
    # Of all, so that the width does not change from round to round.
    nearest = min(candidates, key=lambda s: abs(math.log(storage.model_bytes(s) / max(1, n_bytes))))
    around_layers = nearest.parameters - nearest.n_layers * nearest.layer_parameters
    minimum, step = _smallest(nearest, source, storage), _width_step(nearest, storage)
    shape = nearest
    for n_done in range(_MOST_ROUNDS):
        if n_done >= _LEAST_ROUNDS and _is_met(n_bytes, storage.model_bytes(shape), _CLOSE):
            break
        capacity = n_bytes * shape.parameters / storage.model_bytes(shape) - around_layers
        n_layers = max(minimum.n_layers, round(capacity / nearest.layer_parameters))
        if n_layers > MAX_LAYERS:
            raise SynthError(
                f"{format_bytes(n_bytes)} of this width are {n_layers} layers, more than "
                f"{MAX_LAYERS}: ask for less, or for a wider shape with --like"
            )
        # What is left over or missing is spread over the MLPs of all layers.
        rest = capacity - n_layers * nearest.layer_parameters
        n_steps = round(rest / (3 * nearest.hidden_size * n_layers) / step)
        width = max(minimum.intermediate_size, nearest.intermediate_size + n_steps * step)
        shape = replace(nearest, n_layers=n_layers, intermediate_size=width)
    return shape if _is_met(n_bytes, storage.model_bytes(shape), 0.1) else None


def _is_met(n_bytes: int, matched_bytes: int, tolerance: float) -> bool:
    return abs(matched_bytes - n_bytes) < tolerance * n_bytes


def _smallest(shape: LlamaShape, source: LlamaShape, storage: Storage) -> LlamaShape:
    """The least layers, and the least width in steps from the shape's own."""
    step = _width_step(shape, storage)
    minimum = max(step, source.intermediate_size)
    width = shape.intermediate_size - (shape.intermediate_size - minimum) // step * step
    return replace(shape, n_layers=source.n_layers, intermediate_size=width)


def _width_step(shape: LlamaShape, storage: Storage) -> int:
    """What the MLP's width changes by."""
    return max(1, min(max(_FFN_STEP, storage.block_size), shape.intermediate_size // 4))


def _with_layers(shape: LlamaShape, n_bytes: int, min_layers: int, storage: Storage) -> LlamaShape:
    """As many whole layers as come nearest to `n_bytes`: experts keep their size."""
    minimum = storage.model_bytes(replace(shape, n_layers=min_layers))
    layer = storage.model_bytes(replace(shape, n_layers=min_layers + 1)) - minimum
    n_layers = min_layers + max(0, round((n_bytes - minimum) / layer))
    result = replace(shape, n_layers=n_layers)
    limit = storage.model_bytes(replace(shape, n_layers=MAX_LAYERS))
    if n_layers > MAX_LAYERS or not 0.8 * n_bytes < storage.model_bytes(result) < 1.25 * n_bytes:
        raise SynthError(
            f"cannot reach {format_bytes(n_bytes)}: a mixture's size is that of whole layers, from "
            f"{format_bytes(minimum)} ({min_layers} layers, as the small model has) to "
            f"{format_bytes(limit)} ({MAX_LAYERS} layers), in steps of {format_bytes(layer)}"
        )
    return result
