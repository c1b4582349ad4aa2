"""Seconds of recurrent states: part of what a pass is expected to take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from checkpoints import HYBRIDS

from backends.contract.curve import ComputeCurve
from backends.contract.source import BackendOptions
from backends.hf import source as hf_source
from backends.hf.source import HfSource
from backends.recurrent import timing
from backends.recurrent.shapes import PlaceShape

PRODUCTS = ComputeCurve.linear(1e-9, 1e-10)  # of a byte


def by_kind(shape: PlaceShape, sizes: object, reading: Path | None) -> ComputeCurve:
    """A measurement that tells kinds apart: a second per number of the state."""
    return ComputeCurve.linear(0.0, float(torch.Size(shape.state.shape).numel()))


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_pass_takes_the_seconds_of_all_states(
    family: str, checkpoint_factory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_source, "is_small", lambda source: False)  # such a pass is timed whole
    monkeypatch.setattr(hf_source, "measure_compute", lambda dtype, reading: PRODUCTS)
    monkeypatch.setattr(timing, "_measure", by_kind)
    monkeypatch.setattr(timing, "cached_curve", lambda key, measure, reading: measure())
    source = HfSource(checkpoint_factory(family), BackendOptions())
    n_bytes = sum(layer.n_bytes for layer in source.layers)
    states = [torch.Size(x.state.shape).numel() for x in source.model.recurrences.values()]
    compute = source.measure_compute(beside_reads=False)
    for n in (1, 8, 64):
        expected = n_bytes * PRODUCTS.seconds(n) + n * sum(states)
        assert compute.per_byte.seconds(n) * n_bytes == pytest.approx(expected)
    assert compute.head_per_byte == PRODUCTS
    assert source.state_bytes(2, 8) > 0


def test_a_model_without_states_takes_none(checkpoint_factory) -> None:
    source = HfSource(checkpoint_factory("llama"), BackendOptions())
    assert source.measure_states() is None
    assert source.state_bytes(4, 64) == 0


@pytest.mark.parametrize("family", HYBRIDS)
def test_every_kind_can_be_timed(family: str, checkpoint_factory) -> None:
    recurrences = HfSource(checkpoint_factory(family), BackendOptions()).model.recurrences
    for shape in recurrences.values():
        tree = timing.binary_tree(7)
        state, outputs = timing.pass_of_tree(shape, tree, 3)()  # type: ignore[misc]
        assert tuple(state.shape) == shape.state.shape
        assert len(outputs) == 7
        assert all(x.isfinite().all() for x in outputs)
        other = replace(shape, recurrence=timing._filled(shape.recurrence))
        assert timing._described(shape) == timing._described(other)
    curve = timing.measure_recurrences(recurrences.values(), sizes=(1, 2))
    assert curve.num_tokens == (1, 2)
    assert min(curve.alone) > 0
