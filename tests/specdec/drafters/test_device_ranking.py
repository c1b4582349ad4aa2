"""Ranking on a device finds what numpy finds on the host, and brings few numbers back.

A tensor on the CPU is the device here; the same runs on a GPU in
tests/specdec/drafters/test_device_rows.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cpu_engine import CpuEngine
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch_memory import peak_bytes

from backends.contract.ranking import HEAD_TOKENS, MAX_NOISE_POSITIONS, Ranking, ranking_bytes
from backends.cuda.errors import VramExceeded
from backends.cuda.ranker import DeviceRanker
from backends.cuda.rows import DeviceRows
from specdec.drafters.candidates import CandidateRanker, Candidates
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

CHANCE = 2e-5
"""Of float32 sums in another order: logarithms of chances differ by no more."""
MARGIN = 1e-5
"""Of top-p: where a token ends the nucleus by less, either side may leave it out."""


class RowsElsewhere:
    """What a draft's backend says of its rows."""

    def __init__(self, engine: CpuEngine | None = None) -> None:
        self.engine = engine or CpuEngine()

    def row_ranker(self, ranking: Ranking) -> DeviceRanker:
        return DeviceRanker(ranking, self.engine.device, self.engine.computing)

    def rows(self, logits: np.ndarray, dtype: torch.dtype = torch.float32) -> DeviceRows:
        return DeviceRows(torch.from_numpy(logits).to(dtype), self.engine.computing)


def assert_same(found: Candidates, expected: Candidates, everything: Candidates) -> None:
    """Equal but for tokens of equal chances: which of them come, and in what order, is open."""
    chances = dict(everything)
    assert [c for _, c in found] == pytest.approx([c for _, c in expected], abs=CHANCE)
    assert len({token for token, _ in found}) == len(found)
    for token, chance in found:
        assert chances[token] == pytest.approx(chance, abs=CHANCE)


def is_near_the_end_of_a_nucleus(row: np.ndarray, params: SamplingParams) -> bool:
    best = np.sort(row.astype(np.float64))[::-1]
    best = best[: params.top_k] if 0 < params.top_k <= HEAD_TOKENS else best
    p = np.exp((best - best[0]) / params.temperature)
    return bool(np.abs(np.cumsum(p) / p.sum() - params.top_p).min() < MARGIN)


REQUESTS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 600]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 0.01]),
    min_p=st.sampled_from([0.0, 0.02, 0.5]),
    seed=st.integers(0, 2**63),
)


@settings(max_examples=150, deadline=None)
@given(
    params=REQUESTS,
    shape=st.tuples(st.integers(1, 70), st.sampled_from([1, 2, 63, 64, 65, 517, 700, 1300])),
    n_padding=st.integers(0, 3),
    width=st.integers(1, 80),
    scale=st.sampled_from([0.0, 0.01, 1.0, 6.0]),
    n_banned=st.integers(0, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 999),
)
def test_candidates_are_those_of_the_host(
    params, shape, n_padding, width, scale, n_banned, dtype, seed
) -> None:
    rng = np.random.default_rng(seed)
    (n_rows, n_tokens), elsewhere = shape, RowsElsewhere()
    raw = scale * rng.standard_normal((n_rows, n_tokens + n_padding), dtype=np.float32)
    raw[:, rng.integers(0, n_tokens, n_banned)] = -np.inf
    raw[:, n_tokens:] = 50.0  # padding of the vocabulary
    rows = elsewhere.rows(raw, dtype)
    logits = np.asarray(rows)
    assume(np.isfinite(logits[:, :n_tokens]).any(axis=1).all())
    if not params.is_greedy and params.top_p < 1.0:
        assume(not any(is_near_the_end_of_a_nucleus(one[:n_tokens], params) for one in logits))
    ranker = CandidateRanker.for_target(Sampler(params, n_tokens=n_tokens), n_tokens)
    positions = rng.integers(0, 60, n_rows).tolist()
    expected = ranker.rank(logits, positions, width)
    everything = ranker.rank(logits, positions, n_tokens)
    found = ranker.for_rows_of(elsewhere).rank(rows, positions, width)
    for triple in zip(found, expected, everything, strict=True):
        assert_same(*triple)


def test_rows_of_the_host_are_ranked_there_too() -> None:
    """A prompt's last row is on the host in any case."""
    logits = np.random.default_rng(0).standard_normal((2, 300), dtype=np.float32)
    elsewhere, ranker = RowsElsewhere(), CandidateRanker(300)
    there = ranker.for_rows_of(elsewhere)
    assert there.rank(logits, [1, 2], 4) == there.rank(elsewhere.rows(logits), [1, 2], 4)


@pytest.mark.parametrize("request_of", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 1}])
def test_no_rows_have_no_candidates(request_of: dict) -> None:
    elsewhere = RowsElsewhere()
    sampler = Sampler(SamplingParams(**request_of), n_tokens=40)
    ranker = CandidateRanker.for_target(sampler, 40).for_rows_of(elsewhere)
    assert ranker.rank(elsewhere.rows(np.zeros((0, 40), dtype=np.float32)), [], 3) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_in_which_nothing_is_possible_has_no_candidates(temperature: float) -> None:
    logits = np.zeros((2, 100), dtype=np.float32)
    logits[0] = -np.inf
    elsewhere = RowsElsewhere()
    sampler = Sampler(SamplingParams(temperature=temperature, top_k=3, seed=1), n_tokens=100)
    ranker = CandidateRanker.for_target(sampler, 100).for_rows_of(elsewhere)
    with np.errstate(invalid="ignore"):
        nothing, some = ranker.rank(elsewhere.rows(logits), [5, 6], 3)
    assert nothing == []
    assert len(some) == 3


# --- noise ----------------------------------------------------------------------------------------


def noting(made: list[int]) -> Ranking:
    def noise(position: int) -> np.ndarray:
        if position < 0:
            raise ValueError
        made.append(position)
        return np.full(50, position, dtype=np.float32)

    return Ranking(50, noise=noise)


@settings(max_examples=40, deadline=None)
@given(calls=st.lists(st.lists(st.integers(0, 80), min_size=1, max_size=90), max_size=6))
def test_noise_is_kept_for_the_positions_used_last(calls: list[list[int]]) -> None:
    """As on the host, and where a call needs more of them than are kept."""
    made: list[int] = []
    ranker = RowsElsewhere().row_ranker(noting(made))
    known: list[int] = []  # used last comes last
    for positions in calls:
        made.clear()
        ranker.rank(np.zeros((len(positions), 50), dtype=np.float32), positions, 1)
        expected = []
        for position in positions:
            if position in known:
                known.remove(position)
            else:
                expected.append(position)
            known = [*known, position][-MAX_NOISE_POSITIONS:]
        assert made == expected


def test_every_row_gets_the_noise_of_its_position() -> None:
    """Also behind an error in between, after which no two positions share a place."""
    made: list[int] = []
    ranking = noting(made)
    ranker = RowsElsewhere().row_ranker(ranking)
    assert ranker._noise is not None
    ranker._noise.at([3, 5, 7])
    with pytest.raises(ValueError):
        ranker._noise.at([5, -1])
    for positions in ([7, 9, 11, 3], list(range(40, 72)), [3, 71, 3, 40]):
        found = ranker._noise.at(positions)
        assert found[:, 0].tolist() == positions
    ranker.forget()
    made.clear()
    assert ranker._noise.at([71])[0, 0] == 71
    assert made == [71]


# --- memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_rows", [1, 33, 100])
@pytest.mark.parametrize(
    "request_of",
    [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.9, "min_p": 0.01}],
    ids=["noise", "top-p", "all"],
)
def test_what_is_set_aside_covers_what_is_taken(n_rows: int, request_of: dict) -> None:
    n_tokens, width = 20_011, 64
    elsewhere = RowsElsewhere()
    sampler = Sampler(SamplingParams(temperature=0.8, seed=1, **request_of), n_tokens=n_tokens)
    ranker = CandidateRanker.for_target(sampler, n_tokens).for_rows_of(elsewhere)
    logits = np.random.default_rng(0).standard_normal((n_rows, n_tokens), dtype=np.float32)
    rows, positions = elsewhere.rows(logits), range(n_rows)
    taken = peak_bytes(lambda: ranker.rank(rows, positions, width))
    planned = ranking_bytes(n_rows, n_tokens, width)
    assert taken <= planned - (8 << 20)  # which is a GPU's own
    assert planned - (8 << 20) <= 2 * taken


def test_memory_that_runs_out_is_our_error() -> None:
    def noise(position: int) -> np.ndarray:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0")

    ranker = RowsElsewhere().row_ranker(Ranking(8, noise=noise))
    with pytest.raises(VramExceeded, match="20.00 MiB more"):
        ranker.rank(np.zeros((1, 8), dtype=np.float32), [0], 2)


def test_widths_and_rows_that_are_asked_for_are_all_that_comes_back() -> None:
    elsewhere = RowsElsewhere()
    ranker = elsewhere.row_ranker(Ranking(3000))
    logits = np.random.default_rng(0).standard_normal((70, 3000), dtype=np.float32)

    class NeverBrought(DeviceRows):
        def _fetch(self, part: object) -> np.ndarray:
            raise AssertionError("a row was brought to the host")

    rows = NeverBrought(torch.from_numpy(logits), elsewhere.engine.computing)
    places: Sequence[int] = range(70)
    ranked = ranker.rank(rows, places, 5)
    assert ranked.token_ids.shape == ranked.log_chances.shape == (70, 5)
