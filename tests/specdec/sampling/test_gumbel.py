"""The Gumbel noise, and its purpose: sampled text that no draft can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.sampling.gumbel import SMALLEST_UNIFORM, gumbel_at, gumbel_noise
from specdec.sampling.params import SamplingParams
from specdec.sampling.processors import SamplingError
from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import verify_match
from specdec.verification.tree import DraftTree

N_DRAWS = 60_000
VOCAB = 8
PINNED = [-1.49545161157695, -0.3511371183614871, -0.7859067841514997]
REJECT_BELOW = 1e-6  # seeds are fixed: a correct sampler always passes, a wrong one gets ~0


@pytest.fixture(scope="module")
def noise() -> np.ndarray:
    """float64 [N_DRAWS, VOCAB]: consecutive positions of one seed."""
    return np.stack([gumbel_noise(1234, position, VOCAB) for position in range(N_DRAWS)])


def test_noise_has_the_gumbel_distribution(noise: np.ndarray) -> None:
    assert np.isfinite(noise).all()
    for token in range(VOCAB):
        assert stats.kstest(noise[:, token], "gumbel_r").pvalue > REJECT_BELOW


@pytest.mark.parametrize(
    "p",
    [
        np.full(VOCAB, 1 / VOCAB),
        np.array([0.5, 0.25, 0.1, 0.05, 0.05, 0.03, 0.015, 0.005]),
        np.array([0.0, 0.0, 0.9, 0.0, 0.1, 0.0, 0.0, 0.0]),
    ],
)
def test_marginal_of_the_choice_is_p(noise: np.ndarray, p: np.ndarray) -> None:
    with np.errstate(divide="ignore"):
        counts = np.bincount((np.log(p) + noise).argmax(axis=1), minlength=VOCAB)
    assert counts[p == 0].sum() == 0
    alive = p > 0
    assert stats.chisquare(counts[alive], p[alive] * N_DRAWS).pvalue > REJECT_BELOW


def test_choices_at_neighbouring_positions_are_independent(noise: np.ndarray) -> None:
    p = np.array([0.3, 0.25, 0.15, 0.1, 0.08, 0.06, 0.04, 0.02])
    tokens = (np.log(p) + noise).argmax(axis=1)
    for lag in (1, 2, 7):
        table = np.zeros((VOCAB, VOCAB))
        np.add.at(table, (tokens[:-lag:8], tokens[lag::8][: len(tokens[:-lag:8])]), 1)
        assert stats.chi2_contingency(table).pvalue > REJECT_BELOW


def test_choices_of_different_seeds_are_independent() -> None:
    p = np.array([0.4, 0.3, 0.2, 0.1])
    tokens = np.array(
        [
            [(np.log(p) + gumbel_noise(seed, position, 4)).argmax() for position in (17, 18)]
            for seed in range(8_000)
        ]
    )
    counts = np.bincount(tokens[:, 0], minlength=4)
    assert stats.chisquare(counts, p * len(tokens)).pvalue > REJECT_BELOW
    for first, second in ((tokens[:-1, 0], tokens[1:, 0]), (tokens[:, 0], tokens[:, 1])):
        table = np.zeros((4, 4))
        np.add.at(table, (first, second), 1)
        assert stats.chi2_contingency(table).pvalue > REJECT_BELOW


@settings(deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(1, 300), st.data())
def test_noise_is_prefix_stable_and_addressable(
    seed: int, position: int, n: int, data: st.DataObject
) -> None:
    whole = gumbel_noise(seed, position, 300)
    np.testing.assert_array_equal(gumbel_noise(seed, position, n), whole[:n])
    ids = data.draw(st.lists(st.integers(0, 299), max_size=8))
    np.testing.assert_array_equal(gumbel_at(seed, position, ids), whole[ids])


def test_noise_is_pinned() -> None:
    """The output of a seed must not change with a release: these numbers are a contract."""
    np.testing.assert_allclose(gumbel_noise(0, 0, 3), PINNED, rtol=1e-13)


def test_the_extreme_uniforms_give_finite_noise() -> None:
    largest = 1.0 - 2.0**-53
    for uniform in (SMALLEST_UNIFORM, largest):
        assert np.isfinite(-np.log(-np.log(uniform)))


class MarkovTarget:
    """A toy target with exact tables: logits depend on the last two tokens."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.table = rng.normal(size=(vocab, vocab, vocab)).astype(np.float32) * 1.5

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return self.table[prefix[-2], prefix[-1]]


def decode(
    target: MarkovTarget,
    sampler: Sampler,
    n_tokens: int,
    tree_for: Callable[[list[int], int], DraftTree],
) -> list[int]:
    """The controller's loop in miniature; the first token comes from the prompt alone."""
    text = [0, 1]
    text.append(sampler.choose(text, target.logits(text), position=len(text)))
    while len(text) < n_tokens + 2:
        tree = tree_for(text, n_tokens)
        choose = sampler.chooser(
            lambda node, tree=tree: [*text, *tree.tokens_on_path(node)],
            lambda node, tree=tree: target.logits([*text, *tree.tokens_on_path(node)]),
        )
        outcome = verify_match(tree, choose, n_tokens + 2 - len(text), sampler.stop_tokens)
        text.extend(outcome.emitted(tree))
        if outcome.next_token in sampler.stop_tokens:
            break
    return text


def no_draft(text: list[int], n_tokens: int) -> DraftTree:
    return DraftTree(text[-1])


PARAMS = [
    SamplingParams(temperature=1.0, seed=11),
    SamplingParams(temperature=0.7, top_p=0.8, seed=12),
    SamplingParams(temperature=1.3, top_k=3, repetition_penalty=1.1, seed=13),
    SamplingParams(temperature=0.0, repetition_penalty=1.3),
    SamplingParams(temperature=1.0, seed=14, eos_token_ids=(3,)),
    SamplingParams(temperature=1.0, seed=15, eos_token_ids=(3,), min_tokens=12),
]


@pytest.mark.parametrize("params", PARAMS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_tree_changes_the_text(params: SamplingParams, data: st.DataObject) -> None:
    target = MarkovTarget(6, seed=2)
    sampler = Sampler(params, n_tokens=6, prompt_length=2)
    plain = decode(target, sampler, 24, no_draft)
    nodes = data.draw(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5)), max_size=40))

    def random_tree(text: list[int], n_tokens: int) -> DraftTree:
        tree = DraftTree(text[-1])
        for parent, token in nodes:
            tree.add(parent % len(tree), (token + len(text)) % 6, -1.0)
        return tree

    assert decode(target, sampler, 24, random_tree) == plain
    assert len(plain) <= 26
    assert not sampler.stop_tokens & set(plain[2:-1])


@pytest.mark.parametrize("params", PARAMS)
def test_perfect_and_hopeless_drafts_change_nothing(params: SamplingParams) -> None:
    target = MarkovTarget(6, seed=2)
    sampler = Sampler(params, n_tokens=6, prompt_length=2)
    plain = decode(target, sampler, 24, no_draft)

    def chain(tokens: Sequence[int], root: int) -> DraftTree:
        tree, node = DraftTree(root), 0
        for token in tokens:
            node = tree.add(node, token, -0.1)
        return tree

    def perfect(text: list[int], n_tokens: int) -> DraftTree:
        return chain(plain[len(text) : len(text) + 5], text[-1])

    def hopeless(text: list[int], n_tokens: int) -> DraftTree:
        return chain([(t + 1) % 6 for t in plain[len(text) : len(text) + 5]], text[-1])

    assert decode(target, sampler, 24, perfect) == plain
    assert decode(target, sampler, 24, hopeless) == plain


def test_twenty_repeats_of_a_seed_are_identical() -> None:
    target = MarkovTarget(6, seed=3)
    params = SamplingParams(temperature=1.0, seed=99)
    sequences = {
        tuple(decode(target, Sampler(params, n_tokens=6), 30, no_draft)) for _ in range(20)
    }
    assert len(sequences) == 1


def test_without_a_seed_every_sampler_draws_its_own() -> None:
    params = SamplingParams(temperature=1.0)
    assert len({Sampler(params, n_tokens=4).seed for _ in range(8)}) == 8


@pytest.mark.slow
def test_joint_of_two_positions_is_the_targets() -> None:
    """Over seeds, two tokens in a row have the probability p(a)·p(b|a), with a tree in between."""
    target = MarkovTarget(3, seed=5)
    counts = np.zeros((3, 3))
    tree = DraftTree(1)
    tree.add(tree.add(0, 2, -0.1), 0, -0.1)
    for seed in range(8_000):
        sampler = Sampler(SamplingParams(temperature=1.0, seed=seed), n_tokens=3)
        text = [0, 1]
        while len(text) < 4:
            draft = tree if len(text) == 2 else DraftTree(text[-1])
            choose = sampler.chooser(
                lambda u, d=draft, t=text: [*t, *d.tokens_on_path(u)],
                lambda u, d=draft, t=text: target.logits([*t, *d.tokens_on_path(u)]),
            )
            text = [*text, *verify_match(draft, choose, 4 - len(text)).emitted(draft)]
        counts[text[2], text[3]] += 1
    first = np.exp(target.table[0, 1].astype(float))
    second = np.exp(target.table[1].astype(float))
    joint = (first / first.sum())[:, None] * second / second.sum(axis=1, keepdims=True)
    assert stats.chisquare(counts.ravel(), joint.ravel() * counts.sum()).pvalue > REJECT_BELOW


def test_padding_rows_are_never_chosen() -> None:
    logits = np.zeros(10, dtype=np.float32)
    logits[7:] = 100.0
    for params in (SamplingParams(), SamplingParams(temperature=1.0, seed=1, top_k=2)):
        sampler = Sampler(params, n_tokens=7)
        assert all(sampler.choose([0], logits, position) < 7 for position in range(200))
        log_p = sampler.log_probs([0], logits)
        assert log_p.shape == (10,)
        assert np.isneginf(log_p[7:]).all()
        assert np.exp(log_p).sum() == pytest.approx(1.0, abs=1e-12)
        assert sampler.probs([0], logits).sum() == pytest.approx(1.0, abs=1e-12)


def test_padding_does_not_change_the_text() -> None:
    """The same token is chosen whether the model's vocabulary is padded or not."""
    rng = np.random.default_rng(0)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=4, top_p=0.9), n_tokens=50)
    for position in range(100):
        row = rng.normal(size=50).astype(np.float32)
        padded = np.concatenate([row, rng.normal(size=14).astype(np.float32)])
        assert sampler.choose([1], row, position) == sampler.choose([1], padded, position)


def test_probs_at_temperature_zero_are_one_hot() -> None:
    sampler = Sampler(SamplingParams(), n_tokens=3)
    logits = np.array([0.0, 2.0, 1.0], dtype=np.float32)
    np.testing.assert_array_equal(sampler.probs([0], logits), [0.0, 1.0, 0.0])
    assert sampler.log_probs([0], logits)[1] < 0.0


def test_rows_without_a_choice_are_errors() -> None:
    sampler = Sampler(SamplingParams(), n_tokens=4)
    for bad in (np.nan, np.inf):
        row = np.array([0.0, bad, 1.0, 2.0], dtype=np.float32)
        with pytest.raises(SamplingError, match="NaN or infinite"):
            sampler.choose([0], row, 0)
    banned = Sampler(SamplingParams(suppress_tokens=(0, 1, 2, 3)), n_tokens=4)
    with pytest.raises(SamplingError, match="ruled out"):
        banned.choose([0], np.zeros(4, dtype=np.float32), 0)
    forgiving = Sampler(SamplingParams(remove_invalid_values=True), n_tokens=4)
    assert forgiving.choose([0], np.array([np.nan, -1, 3, 2], dtype=np.float32), 0) == 2
