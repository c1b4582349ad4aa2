"""DFlashDrafter: what it proposes after any history of steps, beside transformers' generator."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest
from dflash_heads import BLOCK_SIZE, FAMILY, TARGET_LAYERS, Reference, save_dflash_head

from backends.contract.backend import LAST_HIDDEN_STATE, MaskedBlock
from backends.contract.sequence import SequenceInput
from backends.contract.source import MAX_PROMPT_STATES
from backends.heads.dflash.source import load_dflash_head
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from specdec.drafters.base import TreeLimits
from specdec.drafters.batched_drafting import run_batched
from specdec.drafters.candidates import CandidateRanker, TargetNoise
from specdec.drafters.dflash import DFlashDrafter
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

PROMPT = [5, 17, 80, 33, 9, 61, 12, 44, 70]
CHAIN, TREE = TreeLimits(16, 16, 1), TreeLimits(24, 16, 8)
N_TOKENS = 96


@pytest.fixture(scope="module")
def directories(checkpoint_factory, tmp_path_factory):
    return checkpoint_factory("qwen3"), save_dflash_head(tmp_path_factory.mktemp("head"), FAMILY)


@pytest.fixture(scope="module")
def models(directories) -> Iterator[tuple[TorchBackend, TorchBackend]]:
    target, head = directories
    model = load_hf_model(target)
    with (
        TorchBackend.kept_in_memory(model) as backend,
        TorchBackend.kept_in_memory(load_dflash_head(CheckpointTarget(model), head)) as drafting,
    ):
        backend.collect_hidden_states((TARGET_LAYERS[0], LAST_HIDDEN_STATE))
        drafting.masked_block = MaskedBlock(BLOCK_SIZE, 3)
        yield backend, drafting


def hand_over(models, drafter, context_ids, start: int) -> None:
    """Give a drafter the states of all tokens from `start` on but the pending one."""
    known = context_ids[:-1]
    chunk = SequenceInput(models[0].new_sequence(), known, hidden_states_at=range(len(known)))
    drafter.take_hidden_states(start, models[0].forward([chunk])[0].hidden_states[start:])


@pytest.mark.parametrize("n_accepted", [[0, 0, 1], [5, 2, 0, 3], [1, 5, 5]])
def test_chains_are_those_of_transformers(models, directories, n_accepted):
    """From 0 to 5 of the tokens are accepted, then the target emits another one."""
    reference, drafter = Reference(*directories), DFlashDrafter(models[1], N_TOKENS)
    context_ids, n_known = list(PROMPT), 0
    for n in n_accepted:
        hand_over(models, drafter, context_ids, n_known)
        tree = drafter.propose(context_ids, CHAIN)
        expected = reference.marginals(context_ids).numpy()
        assert tree.token_ids[1:] == expected.argmax(-1).tolist()
        assert (tree.n_runs, tree.n_run_nodes) == (1, BLOCK_SIZE)
        n_known = len(context_ids) - 1
        context_ids = [*context_ids, *tree.token_ids[1 : 1 + n], 90 + n]
    drafter.reset()


def test_log_probs_are_the_marginals(models, directories):
    """Every node has the probability of its level, whatever its parent."""
    drafter = DFlashDrafter(models[1], N_TOKENS)
    hand_over(models, drafter, PROMPT, 0)
    tree = drafter.propose(PROMPT, TREE)
    rows = Reference(*directories).marginals(PROMPT).double().log_softmax(-1).numpy()
    assert tree.n_drafted == 24
    assert max(tree.depths) > 1
    for i in range(1, len(tree)):
        expected = rows[tree.depths[i] - 1, tree.token_ids[i]]
        assert abs(tree.log_probs[i] - expected) < 1e-3
    drafter.reset()


def test_limits_bound_the_tree(models):
    drafter = DFlashDrafter(models[1], N_TOKENS)
    hand_over(models, drafter, PROMPT, 0)
    for limits in (TreeLimits(7, 2, 3), TreeLimits(3, 9, 9), TreeLimits(40, 40, 2)):
        tree = drafter.propose(PROMPT, limits)
        assert 0 < tree.n_drafted <= limits.max_nodes
        assert max(tree.depths) <= min(limits.max_depth, BLOCK_SIZE - 1)
        assert max(len(tree.children(i)) for i in range(len(tree))) <= limits.width
    drafter.reset()


@pytest.mark.parametrize("limits", [TreeLimits(0, 4, 4), TreeLimits(4, 0, 4)])
def test_nothing_is_run_for_an_empty_tree(models, limits):
    drafter = DFlashDrafter(models[1], N_TOKENS)
    hand_over(models, drafter, PROMPT, 0)
    assert drafter.propose(PROMPT, limits).n_runs == 0
    assert drafter.num_uncomputed(PROMPT) == len(PROMPT) - 1


def test_steps_without_the_draft_are_caught_up(models):
    """A price above 1 leaves the head out; its states wait for the next step that uses it."""
    drafter, fresh = (DFlashDrafter(models[1], N_TOKENS) for _ in range(2))
    hand_over(models, drafter, PROMPT[:4], 0)
    assert drafter.propose(PROMPT[:4], TreeLimits(8, 8, 4, np.inf)).n_drafted == 0
    hand_over(models, drafter, PROMPT, 3)
    hand_over(models, fresh, PROMPT, 0)
    assert drafter.propose(PROMPT, TREE).token_ids == fresh.propose(PROMPT, TREE).token_ids
    drafter.reset()
    fresh.reset()


def test_it_begins_anew_after_a_gap(models):
    """A reused prefix, or a step whose states were lost: the cache begins where states are."""
    drafter = DFlashDrafter(models[1], N_TOKENS)
    hand_over(models, drafter, PROMPT[:3], 0)
    drafter.propose(PROMPT[:3], TREE)
    assert drafter.propose(PROMPT, TREE).n_drafted == 0  # no states of the tokens between
    hand_over(models, drafter, PROMPT, 5)
    tree = drafter.propose(PROMPT, TREE)
    fresh = DFlashDrafter(models[1], N_TOKENS)
    hand_over(models, fresh, PROMPT, 5)
    assert tree.token_ids == fresh.propose(PROMPT, TREE).token_ids
    drafter.reset()
    fresh.reset()


def test_few_states_are_kept(models):
    drafter = DFlashDrafter(models[1], N_TOKENS)
    drafter.take_hidden_states(0, np.zeros((MAX_PROMPT_STATES + 7, 64), dtype=np.float32))
    assert drafter.num_uncomputed([]) == MAX_PROMPT_STATES


def test_a_context_longer_than_the_heads_is_drafted_for(models, directories):
    """The cache begins anew with recent tokens whenever it is full."""
    model = load_hf_model(directories[0])
    rng = np.random.default_rng(0)
    with TorchBackend.kept_in_memory(
        load_dflash_head(CheckpointTarget(model), directories[1]), max_context=24
    ) as small:
        small.masked_block = MaskedBlock(BLOCK_SIZE, 3)
        # The head's embedding is that of `model`, whose weights are in memory nowhere else.
        with TorchBackend.kept_in_memory(model) as target:
            target.collect_hidden_states((TARGET_LAYERS[0], LAST_HIDDEN_STATE))
            drafter, context_ids = DFlashDrafter(small, N_TOKENS), list(PROMPT)
            n_known = 0
            for _ in range(14):
                hand_over((target, small), drafter, context_ids, n_known)
                assert drafter.propose(context_ids, TREE).n_drafted >= TREE.width
                n_known = len(context_ids) - 1
                context_ids += rng.integers(4, 96, size=4).tolist()
            hand_over((target, small), drafter, context_ids, n_known)
            long = rng.integers(4, 96, size=40).tolist()
            hand_over((target, small), drafter, long, 0)
            assert drafter.propose(long, TREE).n_drafted == 24
            drafter.reset()


def test_sequences_share_passes(models):
    """Contexts in one pass, blocks in another, each as alone."""
    prompts = [PROMPT, PROMPT[:4], PROMPT[::-1]]
    alone = []
    for prompt in prompts:
        drafter = DFlashDrafter(models[1], N_TOKENS)
        hand_over(models, drafter, prompt, 0)
        alone.append(drafter.propose(prompt, TREE).token_ids)
        drafter.reset()
    drafters = [DFlashDrafter(models[1], N_TOKENS) for _ in prompts]
    for drafter, prompt in zip(drafters, prompts, strict=True):
        hand_over(models, drafter, prompt, 0)
    sizes, forward = [], models[1].forward
    models[1].forward = lambda batch: sizes.append(len(batch)) or forward(batch)
    try:
        pairs = zip(drafters, prompts, strict=True)
        trees = run_batched([d.propose_in_steps(prompt, TREE) for d, prompt in pairs])
    finally:
        del models[1].forward
    assert sizes == [3, 3]
    assert [tree.token_ids for tree in trees] == alone
    for drafter in drafters:
        drafter.reset()


def test_candidates_are_ranked_with_the_targets_noise(models, directories):
    rows = Reference(*directories).marginals(PROMPT).numpy()
    noise = TargetNoise(seed=4, temperature=0.9, n_tokens=N_TOKENS)
    ranker = CandidateRanker(N_TOKENS, noise=noise)
    drafter = DFlashDrafter(models[1], N_TOKENS, ranker=ranker)
    hand_over(models, drafter, PROMPT, 0)
    places = range(len(PROMPT), len(PROMPT) + BLOCK_SIZE - 1)
    expected = [int((row + noise.at(i)).argmax()) for i, row in zip(places, rows, strict=True)]
    assert drafter.propose(PROMPT, CHAIN).token_ids[1:] == expected
    drafter.reset()


def test_a_grammar_rules_out_candidates_by_their_path(models):
    """Only the token after the one before it, or the same one again."""

    def allowed(prefix, n_tokens):
        mask = np.zeros(n_tokens, dtype=bool)
        mask[[prefix[-1], (prefix[-1] + 1) % N_TOKENS]] = True
        return mask

    ranker = CandidateRanker(N_TOKENS, grammar=SimpleNamespace(allowed=allowed))
    drafter = DFlashDrafter(models[1], N_TOKENS, ranker=ranker)
    hand_over(models, drafter, PROMPT, 0)
    tree = drafter.propose(PROMPT, TREE)
    assert tree.n_drafted == 24
    for i in range(1, len(tree)):
        assert tree.token_ids[i] - tree.token_ids[tree.parents[i]] in (0, 1)
    drafter.reset()


def test_chains_are_drawn_from_the_marginals(models, directories):
    """q of every token is the processed marginal of its position, and tokens follow it."""
    sampler = Sampler(SamplingParams(temperature=0.8, top_k=3, seed=1), n_tokens=N_TOKENS)
    rows = Reference(*directories).marginals(PROMPT).numpy()
    rng, counts = np.random.default_rng(3), np.zeros((BLOCK_SIZE - 1, N_TOKENS))
    drafter = DFlashDrafter(models[1], N_TOKENS, chain=(sampler, rng))
    hand_over(models, drafter, PROMPT, 0)
    n_draws = 300
    for _ in range(n_draws):
        tree = drafter.propose(PROMPT, CHAIN)
        assert tree.is_chain
        for depth, (token, q) in enumerate(
            zip(tree.token_ids[1:], tree.draft_probs[1:], strict=True)
        ):
            counts[depth, token] += 1
            np.testing.assert_allclose(q, sampler.probs(PROMPT, rows[depth]), atol=1e-3)
    for row, own in zip(rows, counts, strict=True):
        np.testing.assert_allclose(own / n_draws, sampler.probs(PROMPT, row), atol=0.12)
    drafter.reset()
