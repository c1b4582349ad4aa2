"""Layers of routed experts in a grown mixture: the place of every weight.

The number of experts is the source's, and a token takes the same ones: the router's new columns
multiply zeros. An expert's first neurons are the source's; the others are random, and their output
columns are zero. With quantised rows, weights are rounded in groups and activations in blocks. So
neurons up to the end of the source's last block output zero: their gate is 0.

The norms of a head's queries and keys keep their width, but have the model's epsilon, which is
scaled for the other norms: for 1e-5, as in trained models, the effect is negligible.

An added layer adds nothing, but routes as the source's layer before it does, with the same weights:
its experts are read like any others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from bench.synth.shapes import LlamaShape
from bench.synth.tensors import Fill, Patch, TensorPlan

_BLOCK = 256  # numbers that llama.cpp rounds together, at most (Q8_K)


def mixture_plans(
    source: LlamaShape, grown: LlamaShape, index: int, places: Mapping[int, int]
) -> list[TensorPlan]:
    """Return norms, router and experts of layer `index`.

    places: copied layers, grown model's index -> source's index; 0 is among them.
    """
    assert source.experts is not None
    assert grown.experts is not None
    prefix, origin = f"model.layers.{index}.", places.get(index)
    before = places[max(place for place in places if place <= index)]
    router = f"model.layers.{before}."
    plans = [
        _head_norm(
            grown, prefix + name, None if origin is None else f"model.layers.{origin}.{name}"
        )
        for name in ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    ]
    plans.append(_norm(source, grown, prefix, router))
    gate = "mlp.gate.weight"
    patch = Patch(0, 0, source.experts.n, source.hidden_size, router + gate)
    shape = (grown.experts.n, grown.hidden_size)
    plans.append(TensorPlan(prefix + gate, shape, Fill.RANDOM, (patch,)))
    for expert in range(grown.experts.n):
        name = f"mlp.experts.{expert}."
        copied = None if origin is None else f"model.layers.{origin}.{name}"
        plans += _expert(source, grown, prefix + name, copied)
    return plans


def _expert(
    source: LlamaShape, grown: LlamaShape, prefix: str, origin: str | None
) -> list[TensorPlan]:
    assert source.experts is not None
    assert grown.experts is not None
    f, big_f = source.experts.intermediate_size, grown.experts.intermediate_size
    d, big_d = source.hidden_size, grown.hidden_size
    n_silent = min(big_f, f + -f % _BLOCK) - f
    gate, up, down = (f"{name}_proj.weight" for name in ("gate", "up", "down"))

    def plan(name: str, shape: tuple[int, int], fill: Fill, *patches: Patch) -> TensorPlan:
        return TensorPlan(prefix + name, shape, fill, patches if origin else ())

    def silent(row: int, column: int, num_rows: int, n_columns: int) -> tuple[Patch, ...]:
        return (Patch(row, column, num_rows, n_columns, scale=0.0),) if n_silent else ()

    source_name = origin or ""
    return [
        plan(
            gate,
            (big_f, big_d),
            Fill.RANDOM,
            Patch(0, 0, f, d, source_name + gate),
            *silent(f, 0, n_silent, d),
        ),
        plan(up, (big_f, big_d), Fill.RANDOM, Patch(0, 0, f, d, source_name + up)),
        plan(
            down,
            (big_d, big_f),
            Fill.ZERO,
            Patch(0, 0, d, f, source_name + down),
            *silent(0, f, d, n_silent),
        ),
    ]


def _norm(source: LlamaShape, grown: LlamaShape, prefix: str, origin: str) -> TensorPlan:
    """Return the norm before the router; an added layer has that of the layer of its router."""
    name = "post_attention_layernorm.weight"
    scale = math.sqrt(source.hidden_size / grown.hidden_size)
    patch = Patch(0, 0, 1, source.hidden_size, origin + name, scale=scale)
    return TensorPlan(prefix + name, (grown.hidden_size,), Fill.GAIN, (patch,), scale)


def _head_norm(grown: LlamaShape, name: str, origin: str | None) -> TensorPlan:
    """Return the norm of a head's queries or keys, whose size is the source's."""
    patches = (Patch(0, 0, 1, grown.head_dim, origin),) if origin else ()
    return TensorPlan(name, (grown.head_dim,), Fill.GAIN, patches)
