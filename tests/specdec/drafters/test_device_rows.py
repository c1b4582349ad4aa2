"""Rows that stay on a device: an array to whoever wants one, and what they may rely on.

The device is the fake one; with the mark `cuda` the same runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from cpu_engine import CpuEngine
from device_talk import ENGINES, NEEDS_CUDA, PROMPT, all_there, on_device
from fake_device import Policy
from graph_tape import AlwaysGraphs, GraphTape

from backends.contract.backend import PREFIX
from backends.contract.ranking import Ranking, ranking_bytes
from backends.cuda.engine import CudaEngine
from backends.cuda.ranker import DeviceRanker
from backends.cuda.rows import DeviceRows
from backends.hf.backend import TorchBackend
from offload.units import GIB
from specdec.drafters.candidates import CandidateRanker
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

VOCAB = 96


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Makes a new one: every model has its own."""
    return request.param


def test_rows_are_an_array_to_whoever_wants_one(engine, checkpoint_factory) -> None:
    directory = checkpoint_factory("llama")
    with TorchBackend.resident(directory) as plain, on_device(directory, engine()) as backend:
        for one in (plain, backend):
            one.prefill(PROMPT)
        expected = np.asarray(plain.extend([7, 9, 11], [PREFIX] * 3)[1])
        rows = backend.extend([7, 9, 11], [PREFIX] * 3)[1]
        assert isinstance(rows, DeviceRows)
        assert rows.shape == expected.shape
        assert len(rows) == 3
        for found in (
            np.asarray(rows),
            np.stack(list(rows)),
            np.stack([rows[i] for i in range(3)]),
        ):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, expected, atol=1e-4)
        assert np.array_equal(rows[-1], rows[2])
        assert np.asarray(rows, dtype=np.float64).dtype == np.float64
        with pytest.raises(IndexError):
            rows[3]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_arrives_as_it_is(dtype: torch.dtype, engine) -> None:
    one = engine()
    logits = torch.randn(3, 50, dtype=dtype, device=one.device)
    rows = DeviceRows(logits, one.computing)
    assert np.array_equal(np.asarray(rows), logits.cpu().float().numpy())
    assert np.array_equal(rows[1], logits[1].cpu().float().numpy())


def test_a_level_outlives_the_recording_that_made_it(engine, checkpoint_factory) -> None:
    """Whose output is written over by the next level of its shape, and freed when it is dropped."""
    one = engine()
    recorder = GraphTape() if isinstance(one, CpuEngine) else AlwaysGraphs()
    with on_device(checkpoint_factory("llama"), one, all_there, cache_rows=512) as draft:
        draft.use_static_passes(recorder)
        draft.prefill(PROMPT)
        kept, copies = [], []
        for token in (7, 8, 9):
            rows = draft.extend([token, token + 20], [PREFIX] * 2)[1]
            kept.append(rows)
            copies.append(np.array(rows))
        assert recorder.n_recorded == 1
        assert not np.array_equal(copies[0], copies[1])
        assert draft._static is not None
        draft._static.forget()
        for rows, copy in zip(kept, copies, strict=True):
            assert np.array_equal(np.asarray(rows), copy)


class Watching(CpuEngine):
    """Notes how often somebody computes in its stream."""

    n_entered = depth = 0

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.n_entered += 1
        self.depth += 1
        try:
            with super().computing():
                yield
        finally:
            self.depth -= 1


def test_rows_are_brought_and_ranked_in_the_stream_that_computed_them(checkpoint_factory) -> None:
    engine = Watching()
    with on_device(checkpoint_factory("llama"), engine, all_there) as backend:
        rows = backend.extend([7, 9], [PREFIX] * 2)[1]
        ranker = backend.row_ranker(Ranking(VOCAB))
        assert ranker is not None
        for use in (
            lambda: rows[1],
            lambda: np.asarray(rows),
            lambda: ranker.rank(rows, [1, 2], 3),
        ):
            before = engine.n_entered
            use()
            assert engine.n_entered == before + 1
            assert engine.depth == 0


def test_a_pass_is_over_when_extend_returns(checkpoint_factory) -> None:
    """So that it is what is timed, and what an error of the device belongs to."""
    engine = CpuEngine()
    with on_device(checkpoint_factory("llama"), engine, all_there) as backend:
        backend.prefill(PROMPT)
        engine.compute_stream.policy = Policy.LATE
        done: list[bool] = []
        engine.compute(lambda: done.append(True))
        backend.extend([7], [PREFIX])
        assert done
        engine.compute_stream.policy = Policy.EARLY


def test_one_ranking_at_a_time_keeps_noise(checkpoint_factory) -> None:
    """Memory is set aside for one; a closed backend keeps none."""

    def noise(position: int) -> np.ndarray:
        return np.zeros(VOCAB, dtype=np.float32)

    with on_device(checkpoint_factory("llama"), CpuEngine(), all_there) as backend:
        rows = backend.extend([7], [PREFIX])[1]
        first: Any = backend.row_ranker(Ranking(VOCAB, noise=noise))
        first.rank(rows, [3], 2)
        assert first._noise._buffer is not None
        second: Any = backend.row_ranker(Ranking(VOCAB, noise=noise))
        assert first._noise._buffer is None
        second.rank(rows, [3], 2)
        other = backend.sibling(max_context=64, max_nodes=8, max_rows=8)
        theirs: Any = other.row_ranker(Ranking(VOCAB, noise=noise))
        assert second._noise._buffer is not None  # a sibling's is its own
        theirs.rank(rows, [3], 2)
        other.close()
        assert theirs._noise._buffer is None
    assert second._noise._buffer is None


@NEEDS_CUDA
@pytest.mark.cuda
def test_on_a_gpu_rows_wait_for_what_computes_them() -> None:
    engine = CudaEngine(2 * GIB)
    with engine.computing():
        logits = torch.zeros(40, 5000, device=engine.device)
        torch.cuda._sleep(50_000_000)
        logits += torch.arange(5000, device=engine.device)
    rows = DeviceRows(logits, engine.computing)
    assert rows[3][4999] == 4999
    with engine.computing():
        torch.cuda._sleep(50_000_000)
        logits.neg_()
    ranked = DeviceRanker(Ranking(5000), engine.device, engine.computing).rank(rows, range(40), 3)
    assert ranked.token_ids.tolist() == [[0, 1, 2]] * 40


@NEEDS_CUDA
@pytest.mark.cuda
@pytest.mark.parametrize("n_rows", [1, 33, 128])
@pytest.mark.parametrize("n_tokens", [5_003, 128_256])
def test_on_a_gpu_ranking_is_numpys_in_the_memory_set_aside(n_rows: int, n_tokens: int) -> None:
    engine = CudaEngine(4 * GIB)
    params = SamplingParams(temperature=1.3, top_k=30, top_p=0.9, min_p=0.01, seed=6)
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=n_tokens), n_tokens)
    torch.manual_seed(0)
    logits = 4 * torch.randn(n_rows, n_tokens).to(engine.device, torch.bfloat16)
    torch.cuda.synchronize()
    rows = DeviceRows(logits, engine.computing)
    there = DeviceRanker(
        Ranking(n_tokens, ranker._sharpness, ranker._noise.fresh, ranker._filters),
        engine.device,
        engine.computing,
    )
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    found = there.rank(rows, range(n_rows), 16)
    taken = torch.cuda.max_memory_allocated() - held
    assert taken <= ranking_bytes(n_rows, n_tokens, 16)
    expected = ranker.rank(rows, range(n_rows), 16)
    for chances, candidates in zip(found.log_chances, expected, strict=True):
        n = len(candidates)
        assert chances[:n] == pytest.approx([chance for _, chance in candidates], abs=1e-3)
