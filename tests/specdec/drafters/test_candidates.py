"""Candidates: the formula, the target's own filters, and the gain by the target's noise."""

from __future__ import annotations

import numpy as np
import pytest
from alone import own
from generating import make_controller, run
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.hf.backend import TorchBackend
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.config import SpecConfig
from specdec.drafters.candidates import (
    MAX_NOISE_POSITIONS,
    SHARPNESS,
    CandidateRanker,
    NoiseRows,
    TargetNoise,
    likeliest,
    lowest_kept,
)
from specdec.drafters.model import ModelDrafter
from specdec.pair import pair_path
from specdec.sampling.gumbel import gumbel_noise
from specdec.sampling.params import SamplingParams
from specdec.sampling.pipeline import LogitsPipeline
from specdec.sampling.sampler import Sampler
from specdec.text.tokenizer import Tokenizer

VOCAB = 40


def logits(num_tokens: int, seed: int = 0, vocab: int = VOCAB) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (3 * rng.standard_normal((num_tokens, vocab))).astype(np.float32)


def chances(scores: np.ndarray) -> np.ndarray:
    return scores - np.logaddexp.reduce(scores)


def test_without_a_target_they_are_the_drafts_probabilities() -> None:
    rows = logits(3)
    for row, actual in zip(rows, CandidateRanker(VOCAB).rank(rows, [4, 5, 6], 7), strict=True):
        expected = chances(row.astype(np.float64))
        assert [token for token, _ in actual] == np.argsort(-expected)[:7].tolist()
        assert [chance for _, chance in actual] == pytest.approx(
            np.sort(expected)[:-8:-1], abs=1e-5
        )


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.3])
def test_they_are_ranked_with_the_targets_noise(temperature: float) -> None:
    """softmax((logits + T g) / s); g belongs to the candidate's position, not to the node's row."""
    sampler = Sampler(SamplingParams(temperature=temperature, seed=11), n_tokens=VOCAB)
    rows, positions = logits(4), [9, 30, 9, 31]
    ranker = CandidateRanker.for_target(sampler, VOCAB)
    for row, position, actual in zip(rows, positions, ranker.rank(rows, positions, 5), strict=True):
        noise = temperature * gumbel_noise(11, position, VOCAB)
        expected = chances((row + noise) / SHARPNESS)
        assert [token for token, _ in actual] == np.argsort(-expected)[:5].tolist()
        assert [c for _, c in actual] == pytest.approx(np.sort(expected)[:-6:-1], abs=1e-4)
        assert actual[0][0] == sampler.choose([0] * position, row, position)


def test_ids_beyond_the_targets_are_no_candidates() -> None:
    rows = np.zeros((1, VOCAB), dtype=np.float32)
    rows[0, 30:] = 9.0
    ((*actual,),) = CandidateRanker(30).rank(rows, [0], VOCAB)
    assert sorted(token for token, _ in actual) == list(range(30))


FILTERS = st.builds(
    lambda temperature, top_k, top_p, min_p: SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=3
    ),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.sampled_from([0, 1, 3, 39, 100]),
    st.sampled_from([1.0, 0.9, 0.5, 0.01]),
    st.sampled_from([0.0, 0.02, 0.5]),
)


@settings(max_examples=200, deadline=None)
@given(params=FILTERS, seed=st.integers(0, 1000))
def test_the_filters_are_the_pipelines(params: SamplingParams, seed: int) -> None:
    (row,) = logits(1, seed)
    cached = LogitsPipeline(params)([0], row) > -np.inf
    floor = lowest_kept(row, params)
    assert (row >= floor).tolist() == cached.tolist()
    (actual,) = CandidateRanker.for_target(Sampler(params, n_tokens=VOCAB), VOCAB).rank(
        row[None], [5], VOCAB
    )
    assert sorted(token for token, _ in actual) == np.flatnonzero(cached).tolist()


def test_a_nucleus_of_most_of_a_large_vocabulary_is_left_whole() -> None:
    row = np.zeros(5000, dtype=np.float32)
    assert lowest_kept(row, SamplingParams(temperature=1.0, top_p=0.9)) == -np.inf
    assert lowest_kept(row, SamplingParams(temperature=1.0, top_k=2000)) == -np.inf


@settings(max_examples=60, deadline=None)
@given(
    n_tokens=st.integers(8, 3000),
    width=st.integers(1, 8),
    n_banned=st.integers(0, 5),
    seed=st.integers(0, 99),
)
def test_the_likeliest_are_found_in_stripes(n_tokens, width, n_banned, seed) -> None:
    rows = logits(3, seed, n_tokens)
    rows[:, :n_banned] = -np.inf
    actual = likeliest(rows, width)
    assert actual.shape == (3, width)
    best = np.sort(np.argsort(rows, axis=1)[:, -width:], axis=1)
    values = np.take_along_axis(rows, actual, axis=1)
    assert np.array_equal(
        np.sort(values, axis=1), np.sort(np.take_along_axis(rows, best, axis=1), axis=1)
    )
    assert all(len(set(row)) == width for row in actual.tolist())


def test_noise_is_cached_for_the_positions_in_use_only() -> None:
    rows = NoiseRows()
    noise = TargetNoise(3, 0.7, VOCAB, rows)
    first = noise.at(5)
    assert noise.at(5) is first
    for position in range(100):
        assert noise.at(position) == pytest.approx(0.7 * gumbel_noise(3, position, VOCAB), abs=1e-5)
    assert len(rows) == MAX_NOISE_POSITIONS


def test_sequences_share_the_memory_for_their_noise() -> None:
    """Otherwise a list of prompts would take 32 rows of the vocabulary for each of them."""
    rows = NoiseRows(7)
    sequences = [TargetNoise(seed, 0.7, VOCAB, rows) for seed in range(5)]
    for position in range(20):
        for seed, noise in enumerate(sequences):
            expected = 0.7 * gumbel_noise(seed, position, VOCAB)
            assert noise.at(position) == pytest.approx(expected, abs=1e-5)
    assert len(rows) == 7


# --- gain on the embedded pair --------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair():
    with (
        TorchBackend.resident(pair_path("pair:target")) as target,
        TorchBackend.resident(pair_path("pair:draft")) as draft,
    ):
        yield target, draft


@pytest.mark.slow
def test_the_targets_noise_raises_acceptance(pair) -> None:
    """The output still equals plain decoding with the same seed, whatever the drafter used."""
    target, draft = pair
    tokenizer = Tokenizer.from_pretrained(pair_path("pair:target"))
    spec, n = SpecConfig(num_draft_tokens=8, draft_depth=8), 32
    passes = {"coupled": 0, "blind": 0}
    for seed, prompt in enumerate(read_prompts(BUILT_IN, 4)):
        params = SamplingParams(temperature=0.7, seed=seed)
        ids = tokenizer.encode(prompt.text)
        sampler = Sampler(params, n_tokens=tokenizer.n_tokens)
        n_tokens = tokenizer.n_tokens
        blind = CandidateRanker(n_tokens, sharpness=params.temperature)
        for name, ranker in (
            ("coupled", CandidateRanker.for_target(sampler, n_tokens)),
            ("blind", blind),
        ):
            drafter = ModelDrafter(draft, n_tokens, ranker=ranker)
            own(target).rollback(0)
            drafter.reset()
            made = make_controller(target, drafter, params, spec=spec)
            token_ids = [made.start(ids)]
            while len(token_ids) < n:
                token_ids += made.step(n - len(token_ids)).token_ids
                passes[name] += 1
            if name == "coupled" and seed == 0:
                assert token_ids == run(target, ids, n, params=params)
    assert passes["coupled"] < 0.9 * passes["blind"], passes
