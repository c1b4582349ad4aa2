"""Seconds of recurrences on this machine, by the number of nodes of a tree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from backends.contract.curve import ComputeCurve
from backends.recurrent.kinds import Recurrence, State
from backends.recurrent.shapes import PlaceShape, TensorSpec
from backends.timing.cached import cached_curve
from backends.timing.measure import measure_curve

SIZES = (1, 4, 16, 64, 128)


def measure_recurrences(
    shapes: Iterable[PlaceShape], reading: Path | None = None, sizes: Sequence[int] = SIZES
) -> ComputeCurve:
    """Return seconds of a pass in all these recurrences, measured once a month for each kind.

    reading: see `measure_curve`.
    """
    kinds: dict[str, PlaceShape] = {}
    counts: Counter[str] = Counter()
    for shape in shapes:
        key = f"{_described(shape)} {torch.get_num_threads()} threads {tuple(sizes)}"
        kinds[key] = shape
        counts[key] += 1
    parts = []
    for key, n in counts.items():
        measure = partial(_measure, kinds[key], sizes, reading)
        parts.append((float(n), cached_curve(key, measure, reading)))
    return ComputeCurve.mixed(parts)


def pass_of_tree(
    shape: PlaceShape, parents: Sequence[int], n_accepted: int
) -> Callable[[], object]:
    """Return a function that does what a pass does in one recurrence: apply an accepted path to the
    state, and compute the nodes of a tree."""
    recurrence = _filled(shape.recurrence)
    state, rows = _random(shape.state), tuple(map(_random, _rows(shape, len(parents))))
    accepted = tuple(map(_random, _rows(shape, n_accepted)))
    nodes = list(range(len(parents)))

    def run() -> tuple[State, list[torch.Tensor]]:
        after, _ = recurrence.advance(state, accepted)
        return after, recurrence.branch(after, rows, parents, nodes)

    return run


def binary_tree(n_nodes: int) -> list[int]:
    """Return the parents of a tree with two children below each node."""
    return [(node - 1) // 2 if node else -1 for node in range(n_nodes)]


def _measure(shape: PlaceShape, sizes: Sequence[int], reading: Path | None) -> ComputeCurve:
    with torch.inference_mode():
        passes = {n: pass_of_tree(shape, binary_tree(n), n.bit_length()) for n in sizes}
        return measure_curve(passes, 1.0, reading)


def _described(shape: PlaceShape) -> str:
    """Return all that the times of a recurrence depend on."""
    values = {field.name: getattr(shape.recurrence, field.name) for field in fields(_data(shape))}
    tensors = {
        name: (tuple(x.shape), x.dtype) if isinstance(x, torch.Tensor) else x
        for name, x in values.items()
        if not callable(x)
    }
    kind = type(shape.recurrence).__name__
    return f"torch {torch.__version__} {kind} {tensors} {shape.state} {shape.fed}"


def _data(shape: PlaceShape) -> Any:
    return shape.recurrence  # every kind is a dataclass


def _filled(recurrence: Recurrence) -> Recurrence:
    """Return a recurrence with random numbers in place of tensors without memory."""
    data: Any = recurrence
    values = ((field.name, getattr(recurrence, field.name)) for field in fields(data))
    random = {
        name: _random(TensorSpec(tuple(x.shape), x.dtype))
        for name, x in values
        if isinstance(x, torch.Tensor)
    }
    filled: Recurrence = replace(data, **random)
    return filled


def _rows(shape: PlaceShape, n_tokens: int) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec((n_tokens, *spec.shape), spec.dtype) for spec in shape.fed)


def _random(spec: TensorSpec) -> torch.Tensor:
    """Return numbers from -1 to 0: as logarithms of decays they let no state grow."""
    return -torch.rand(spec.shape, dtype=torch.float32).to(spec.dtype)
