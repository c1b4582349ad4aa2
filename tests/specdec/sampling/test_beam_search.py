"""Beam search on tables: against exhaustive search, and its use of the KV cache."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from alone import own
from beams import search, steps
from exact_rules import table_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from table_backend import TableBackend

from specdec.engine.sequences.beam_sequence import BeamMemoryFull
from specdec.sampling.beam_search import BeamRules, BeamSearch, best_continuations, by_score
from specdec.sampling.gumbel import gumbel_at
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import SamplingError
from specdec.sampling.sampler import Sampler

REJECT_BELOW = 1e-6


def test_draws_are_without_replacement_in_the_right_proportions():
    """Ordered triples of five continuations, one of them impossible: Plackett-Luce exactly."""
    p = np.array([0.4, 0.3, 0.0, 0.2, 0.1])
    with np.errstate(divide="ignore"):
        scores = np.log(p).astype(np.float32)
    chances = {}
    for triple in itertools.permutations([0, 1, 3, 4], 3):
        left, chance = 1.0, 1.0
        for i in triple:
            chance, left = chance * p[i] / left, left - p[i]
        chances[triple] = chance
    counts = dict.fromkeys(chances, 0)
    for seed in range(6000):
        taken = best_continuations(scores + gumbel_at(seed, 9, np.arange(5)), 3)
        counts[tuple(taken.tolist())] += 1
    expected = [chance * 6000 for chance in chances.values()]
    assert stats.chisquare(list(counts.values()), expected).pvalue > REJECT_BELOW
    assert best_continuations(scores, 5).tolist() == [0, 1, 3, 4, 2]  # the impossible one last


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 4), st.integers(1, 4), st.data())
def test_enough_beams_find_the_best_sequence_of_all(seed, vocab, length, data):
    """As many beams as prefixes prune nothing: the result is the exhaustive argmax."""
    rows = table_rows(vocab, seed)
    n = data.draw(st.integers(1, 3))
    params = SamplingParams(num_beams=max(2, n, vocab ** (length - 1)), n=n, max_tokens=length)

    def log_p(tokens: tuple[int, ...]) -> float:
        return sum(np.log(rows((0, *tokens[:i]))[t]) for i, t in enumerate(tokens))

    everything = sorted(itertools.product(range(vocab), repeat=length), key=lambda s: -log_p(s))
    actual = search(TableBackend(rows, vocab), [0], params)
    best = [log_p(sequence) / length for sequence in everything[:n]]
    assert [score for _, score in actual] == pytest.approx(best[: len(actual)], rel=1e-4, abs=1e-6)
    assert actual[0][0].token_ids == everything[0] or best[0] == pytest.approx(
        log_p(everything[1]) / length, rel=1e-5
    )


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(2, 5), st.integers(2, 6), st.booleans())
def test_the_cache_holds_the_tree_of_the_running_beams_and_no_more(seed, beams, vocab, is_sampled):
    target = TableBackend(table_rows(vocab, seed), vocab)
    params = SamplingParams(
        num_beams=beams, max_tokens=12, temperature=float(is_sampled), seed=seed
    )
    prompt = [0, 1]
    for beams_now in steps(target, prompt, params, (0,), 12):
        sequences = {
            beam.token_ids[:-1] for beam in beams_now._search.running
        }  # the last is pending
        shared = 0
        while len({text[: shared + 1] for text in sequences}) == 1 and shared < min(
            map(len, sequences)
        ):
            shared += 1
        prefixes = {text[:i] for text in sequences for i in range(shared + 1, len(text) + 1)}
        assert own(target).n_committed == len(prompt) + shared
        assert len(target.table) == len(prefixes)


def test_a_tree_larger_than_its_capacity_is_refused_before_the_pass():
    target = TableBackend(table_rows(4, 1), 4)
    target.max_nodes = 5
    params = SamplingParams(num_beams=4, max_tokens=20)
    with pytest.raises(BeamMemoryFull, match=r"4 beams need \d+ live tokens.*memory for 5"):
        search(target, [0], params)


def test_beams_end_where_nothing_can_follow():
    """All tokens but the end are ruled out: one sequence ends, no second one exists."""
    params = SamplingParams(num_beams=3, n=3, max_tokens=8, suppress_tokens=(0, 2, 3))
    actual = search(TableBackend(table_rows(4, 3), 4), [0], params, eos=(1,))
    assert [item.token_ids for item, _ in actual][0] == (1,)


def test_early_stopping_bounds_the_search():
    """True stops at num_beams finished ones, "never" only if no beam can improve on them."""
    lengths = {}
    for early_stopping in (True, False, "never"):
        n_steps = []
        for seed in range(30):
            rules = BeamRules(2, 1.0, early_stopping, n_eos=1, max_new_tokens=30)
            rows = table_rows(5, seed)
            state: BeamSearch[tuple[int, ...]] = BeamSearch(
                rules,
                (),
                lambda item, token: (*item, token),
                lambda item: item[-1] == 0 or len(item) == 30,
                by_score,
            )
            steps = 0
            while not state.is_over:
                log_p = [np.log(rows(item)) for item in state.running]
                state.advance(np.array(log_p, dtype=np.float32))
                steps += 1
            n_steps.append(steps)
        lengths[early_stopping] = n_steps
    pairs = zip(lengths[True], lengths[False], lengths["never"], strict=True)
    assert all(item <= two <= three for item, two, three in pairs)
    assert sum(lengths[True]) < sum(lengths[False]) < sum(lengths["never"])


@pytest.mark.parametrize("is_drawn", [False, True])
def test_beams_of_a_large_vocabulary_are_ranked_row_by_row(is_drawn: bool) -> None:
    """Scores of all continuations, their order and their noise would be gigabytes."""

    def drawn(scores, which):
        return scores + gumbel_at(1, 9, which)

    n_beams, vocab = 40, 20_000
    rank = drawn if is_drawn else by_score
    rng = np.random.default_rng(0)
    state: BeamSearch[tuple[int, ...]] = BeamSearch(
        BeamRules(n_beams), (), lambda item, token: (*item, token), lambda _: False, rank
    )
    tracemalloc.start()
    try:
        for _ in range(2):
            state.advance(rng.standard_normal(vocab, np.float32) for _ in range(n_beams))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < n_beams * vocab * 4


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 999), n_beams=st.integers(1, 6), vocab=st.integers(1, 9))
def test_ranking_row_by_row_takes_the_same_as_all_at_once(seed, n_beams, vocab) -> None:
    """Ties and impossible tokens are among them."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(-3, 1, (n_beams, vocab)).astype(np.float32)
    rows[rng.random(rows.shape) < 0.2] = -np.inf
    flat, k = rows.reshape(-1), min(2 * n_beams, rows.size)

    def drawn(scores, which):
        return scores + gumbel_at(seed, 9, which)

    for rank, expected in (
        (by_score, best_continuations(flat, k)),
        (drawn, best_continuations(drawn(flat, np.arange(flat.size)), k)),
    ):
        asked: list[int] = []
        state: BeamSearch[int] = BeamSearch(
            BeamRules(n_beams), 0, lambda _, token: token, lambda _: False, rank
        )
        state._scores[:] = 0.0
        state.running = list(range(0, n_beams * vocab, vocab))
        state._grow = lambda beam, token, asked=asked: asked.append(beam + token) or 0
        state.advance(rows)
        assert asked == expected.tolist()


def test_beams_need_neither_torch_nor_transformers():
    program = """
import sys
import numpy as np
from beams import search
from table_backend import TableBackend
from specdec.sampling.params import SamplingParams
for temperature in (0.0, 0.8):
    options = {"num_beams": 3, "n": 2, "max_tokens": 5, "top_k": 5, "seed": 1}
    params = SamplingParams(temperature=temperature, **options)
    found = search(TableBackend(lambda prefix: np.arange(1.0, 9.0), 8), [1], params, (2,))
    assert len(found) == 2
assert not {"torch", "transformers"} & set(sys.modules), "imported"
"""
    root = Path(__file__).resolve().parents[3]
    path = os.pathsep.join([str(root), str(root / "tests" / "helpers")])
    environment = {**os.environ, "PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_no_distribution_ends_the_search(value: float) -> None:
    sampler = Sampler(SamplingParams(), n_tokens=4)
    row = np.array([0.0, value, 1.0, 2.0], dtype=np.float32)
    with pytest.raises(SamplingError, match="position 2 have 1 NaN or infinite"):
        sampler.beam_log_probs([1, 2], row)
