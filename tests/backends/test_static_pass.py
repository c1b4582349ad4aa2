"""Passes of fixed shapes give what passes of the shapes at hand give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.base import PREFIX, BackendError
from backends.hf_model import load_hf_model
from backends.kv_cache import TreeCache
from backends.static_pass import CudaGraphs, Replay, Unrecorded
from backends.torch_backend import TorchBackend
from backends.torch_cpu import CpuWeights

PROMPT = [3, 17, 5, 60, 41, 8, 22, 9, 33, 70, 11, 54]
TOLERANCE = 1e-5
FAMILIES = ["llama", "qwen2-sliding", "gemma2", "gemma3", "minicpm3", "gpt-neox"]


class Tape:
    """A recorder that, like a graph, replays what it saw with the memory that it saw.

    It runs the function again, and fails where a recording is replayed that was forgotten.
    """

    def __init__(self) -> None:
        self.n_recorded = self.n_replayed = self.generation = 0

    def record(self, run: Replay) -> Replay:
        run()  # as the warm-up does: running it again must change nothing
        self.n_recorded += 1
        generation = self.generation

        def replay() -> torch.Tensor:
            assert generation == self.generation, "its addresses are gone"
            self.n_replayed += 1
            return run()

        return replay

    def forget(self) -> None:
        self.generation += 1


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_no_logits(family, checkpoint_factory) -> None:
    """Levels of several widths, commits and prunes between them, and another text after them."""
    directory, tape = checkpoint_factory(family), Tape()
    with TorchBackend.resident(directory) as plain, TorchBackend.resident(directory) as static:
        static.use_static_passes(tape)
        for prompt in (PROMPT, PROMPT[:5]):
            for backend in (plain, static):
                backend.rollback(0)
                backend.prefill(prompt)
            rng = np.random.default_rng(len(prompt))
            live: list[int] = []
            for n_new in (3, 1, 8, 9, 20, 2):
                first = plain.next_node_id
                parents = [int(rng.choice([PREFIX, *live])) for _ in range(n_new - 1)]
                parents.append(first if n_new > 1 else PREFIX)  # one below another of its level
                tokens = rng.integers(3, 90, n_new).tolist()
                found = [backend.extend(tokens, parents) for backend in (plain, static)]
                assert found[0][0] == found[1][0]
                assert difference(found[1][1], found[0][1]) <= TOLERANCE
                live += found[0][0]
                if n_new == 8:
                    for backend in (plain, static):
                        backend.prune(live[:2])
                    live = list(plain._table.ids)
                if n_new == 9:
                    path = plain._table.path(live[-1])
                    below = [n for n in live if plain._table.path(n)[:-1] == path]
                    for backend in (plain, static):
                        backend.commit(path, keep=below)
                    live = list(plain._table.ids)
            assert static.n_committed == plain.n_committed
    assert tape.n_recorded < tape.n_replayed


@settings(max_examples=15, deadline=None)
@given(widths=st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_shapes_are_recorded_once(widths, tiny_llama) -> None:
    tape = Tape()
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
    tape = Tape()
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
        "backends.kv_cache._empty_rows",
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
            patch.setattr("backends.static_pass.run_model", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                backend.extend([7], [PREFIX])
        assert backend.n_committed == len(PROMPT)
        assert np.array_equal(backend.extend([7, 8], [PREFIX] * 2)[1], expected)


def test_wide_levels_and_chosen_rows_go_the_usual_way(checkpoint_factory) -> None:
    tape = Tape()
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


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_cuda_graph_replays_with_new_inputs(dtype: torch.dtype) -> None:
    buffer = torch.zeros(4, device="cuda", dtype=dtype)
    weight = torch.eye(4, device="cuda", dtype=dtype) * 3
    graphs = CudaGraphs()
    replay = graphs.record(lambda: weight @ buffer)
    for value in (1.0, 2.0):
        buffer.fill_(value)
        assert replay().tolist() == [3 * value] * 4
    graphs.forget()
