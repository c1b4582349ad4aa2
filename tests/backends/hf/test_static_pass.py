"""Passes of fixed shapes give what passes of the shapes at hand give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from device_talk import PROMPT, level_after_level
from graph_tape import GraphTape
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.contract.backend import PREFIX, BackendError
from backends.cuda.graphs import Unrecorded
from backends.hf.backend import TorchBackend
from backends.hf.cache import TreeCache
from backends.hf.cpu_weights import CpuWeights
from backends.hf.model import load_hf_model
from backends.hf.static_pass import static_keys, static_shapes

TOLERANCE = 1e-5
FAMILIES = ["llama", "qwen2-sliding", "gemma2", "gemma3", "minicpm3", "gpt-neox"]


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_levels_equal_those_that_are_run(family: str, checkpoint_factory) -> None:
    """Padded, over other keys, and with nothing of the code that asked for them."""
    directory, tape = checkpoint_factory(family), GraphTape()
    with TorchBackend.resident(directory) as plain, TorchBackend.resident(directory) as static:
        static.use_static_passes(tape)
        assert level_after_level(plain, static) <= TOLERANCE
    assert tape.n_recorded == 3  # of 8, 16 and 32 rows
    assert tape.n_replayed == 12


@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_shapes_are_recorded_once(widths, tiny_llama) -> None:
    tape = GraphTape()
    with TorchBackend.resident(tiny_llama, max_context=200) as backend:
        backend.use_static_passes(tape)
        backend.prefill(PROMPT)
        for n_new in widths:
            backend.extend([5] * n_new, [PREFIX] * n_new)
    shapes = {max(8, 1 << (n - 1).bit_length()) for n in widths}
    assert tape.n_recorded == len(shapes)
    assert tape.n_replayed == len(widths)


@pytest.fixture(scope="module")
def tiny_llama(checkpoint_factory):
    return checkpoint_factory("llama")


def test_recordings_go_where_the_cache_moves(checkpoint_factory) -> None:
    """A longer prompt needs more memory; one after `free` may get the old addresses back."""
    tape = GraphTape()
    with TorchBackend.resident(
        checkpoint_factory("llama", max_position_embeddings=2048)
    ) as backend:
        backend.use_static_passes(tape)
        for n_prompt, n_recorded in ((12, 1), (300, 1), (900, 2), (12, 2)):
            backend.rollback(0)
            backend.prefill([5] * n_prompt)
            backend.extend([7], [PREFIX])
            assert tape.n_recorded == n_recorded


def test_memory_that_holds_nan_does_no_harm(checkpoint_factory, monkeypatch) -> None:
    """New memory of the cache holds anything; what is hidden is multiplied by 0."""
    monkeypatch.setattr(
        "backends.hf.cache._empty_rows",
        lambda like, n: torch.full((*like.shape[:2], n, like.shape[3]), torch.nan),
    )
    with TorchBackend.resident(checkpoint_factory("llama")) as backend:
        backend.use_static_passes(Unrecorded())
        backend.prefill(PROMPT)
        assert np.isfinite(backend.extend([7, 8], [PREFIX] * 2)[1]).all()


def test_an_error_leaves_the_cache_as_it_was(checkpoint_factory, monkeypatch) -> None:
    with TorchBackend.resident(checkpoint_factory("llama")) as backend:
        backend.use_static_passes(Unrecorded())
        backend.prefill(PROMPT)
        expected = backend.extend([7, 8], [PREFIX] * 2)[1]
        backend.rollback(len(PROMPT))
        with monkeypatch.context() as patch:
            patch.setattr("backends.hf.static_pass.run_model", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backend.extend([7], [PREFIX])
        assert backend.n_committed == len(PROMPT)
        assert np.array_equal(backend.extend([7, 8], [PREFIX] * 2)[1], expected)


def test_wide_levels_and_chosen_rows_go_the_usual_way(checkpoint_factory) -> None:
    tape = GraphTape()
    with TorchBackend.resident(
        checkpoint_factory("llama", max_position_embeddings=2048)
    ) as backend:
        backend.use_static_passes(tape)
        backend.prefill(PROMPT)
        backend.extend([5] * 300, [PREFIX] * 300)
        backend.extend([5] * 3, [PREFIX] * 3, rows=[2])
    assert tape.n_recorded == 0


def test_what_cannot_be_recorded_is_refused(checkpoint_factory) -> None:
    with TorchBackend.resident(checkpoint_factory("bloom")) as backend:
        assert not backend.can_use_static_passes
        with pytest.raises(BackendError, match="passes of bloom cannot be recorded"):
            backend.use_static_passes(Unrecorded())
    model = load_hf_model(checkpoint_factory("llama"))
    weights = CpuWeights(model, model.layer_weights, 2)
    with TorchBackend(model, weights) as backend, pytest.raises(BackendError, match="recorded"):
        backend.use_static_passes(Unrecorded())


def test_masks_are_whole_blocks_wide() -> None:
    """Kernels refuse masks whose rows do not begin at round addresses."""
    for n_rows in (1, 40, 511, 513, 1300, 2000):
        for most in (n_rows, 1111, 5000):
            n_keys = static_keys(n_rows, max(n_rows, most))
            assert n_keys % 256 == 0
            assert n_rows <= n_keys
            assert n_keys <= max(512, 2 * n_rows, most + 256 + 255)
    assert [n for most in (1, 8, 9, 300) for n in [static_shapes(most)[-1]]] == [8, 8, 16, 256]


def test_positions_that_go_by_the_length_are_not_recorded(checkpoint_factory) -> None:
    """Their code asks the device for the longest position before it computes."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    with TorchBackend.resident(checkpoint_factory("llama", rope_parameters=rope)) as backend:
        assert not backend.can_use_static_passes


def test_a_cache_that_has_its_size_from_the_start_never_moves(checkpoint_factory) -> None:
    """What recordings hold stays where it is, and the memory is what was planned."""
    directory, tape = checkpoint_factory("llama", max_position_embeddings=2048), GraphTape()
    model = load_hf_model(directory)
    layers = [
        one.with_resident(frozenset(t.name for t in one.tensors)) for one in model.layer_weights
    ]
    with TorchBackend(
        model, CpuWeights(model, layers, 0), max_context=1000, max_nodes=200, cache_rows=1456
    ) as backend:
        backend.use_static_passes(tape)
        places = set()
        for n_prompt in (12, 300, 600, 900, 12):
            backend.rollback(0)
            backend.prefill([5] * n_prompt)
            backend.extend([5] * 100, [PREFIX] * 100)
            places.add(backend._cache.layers[0].keys.data_ptr())
            assert backend.n_kv_allocated == 1536
        assert len(places) == 1
        assert tape.n_recorded == 3  # over 512, 1024 and 1536 keys
        other = backend.sibling(max_context=64, max_nodes=32, max_rows=8)
        other.prefill([5] * 3)
        assert other.n_kv_allocated == 256
        other.close()


def test_rows_written_do_not_count_before_they_are_appended() -> None:
    cache = TreeCache(1)
    states = torch.arange(8.0).view(1, 1, 4, 2)
    cache.layers[0].update(states, states)
    cache.reserve(300)
    cache.clear_unused()
    with cache.writing_at(torch.tensor([4, 5]), 8):
        keys, _ = cache.layers[0].update(states[:, :, :2], states[:, :, :2])
    assert keys[0, 0, :, 1].tolist() == [1, 3, 5, 7, 1, 3, 0, 0]
    assert cache.layers[0].n_rows == 4
    cache.appended(1)
    assert cache.layers[0].n_rows == 5
