"""DFlashDrafter with a DFlash 2 head: a candidate's probability depends on the token before it."""

from __future__ import annotations

import numpy as np
import pytest
from dflash2_heads import TOP_K, save_dflash2_head
from dflash_heads import BLOCK_SIZE, MASK_TOKEN_ID, TARGET_LAYERS

from backends.contract.backend import LAST_HIDDEN_STATE, PREFIX, MaskedBlock
from backends.contract.sequence import SequenceInput
from backends.heads.dflash.source import load_dflash_head
from backends.heads.target import CheckpointTarget
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from specdec.drafters.base import TreeLimits
from specdec.drafters.candidates import CandidateRanker, TargetNoise
from specdec.drafters.dflash import DFlashDrafter
from specdec.drafters.marginals import Transitions
from specdec.sampling.params import SamplingParams
from specdec.sampling.sampler import Sampler

PROMPT = [5, 17, 80, 33, 9, 61, 12, 44, 70]
N_TOKENS = 96


@pytest.fixture(scope="module")
def models(checkpoint_factory, tmp_path_factory):
    model = load_hf_model(checkpoint_factory("llama"))
    head = load_dflash_head(
        CheckpointTarget(model), save_dflash2_head(tmp_path_factory.mktemp("head"))
    )
    with (
        TorchBackend.kept_in_memory(model) as backend,
        TorchBackend.kept_in_memory(head) as drafting,
    ):
        backend.collect_hidden_states((TARGET_LAYERS[0], LAST_HIDDEN_STATE))
        drafting.collect_hidden_states((LAST_HIDDEN_STATE,))
        drafting.masked_block = MaskedBlock(BLOCK_SIZE, MASK_TOKEN_ID, TOP_K)
        yield backend, drafting


@pytest.fixture(scope="module")
def states(models):
    known = PROMPT[:-1]
    chunk = SequenceInput(models[0].new_sequence(), known, hidden_states_at=range(len(known)))
    return models[0].forward([chunk])[0].hidden_states


@pytest.fixture(scope="module")
def transitions(models, states):
    """The head's own output after the prompt: (tokens [n, k], scores [n, k, k])."""
    sequence, masked = models[1].new_sequence(), range(1, BLOCK_SIZE)
    context = SequenceInput(sequence, PROMPT[:-1], logits_at=[], hidden_states=states)
    models[1].forward([context])
    first = sequence.next_node_id
    block = SequenceInput(
        sequence,
        [PROMPT[-1], *[MASK_TOKEN_ID] * (BLOCK_SIZE - 1)],
        [PREFIX, *range(first, first + BLOCK_SIZE - 1)],
        masked,
        masked,
    )
    rows = models[1].forward([block])[0].hidden_states
    sequence.close()
    return rows[:, :TOP_K].astype(int), rows[:, TOP_K:].reshape(-1, TOP_K, TOP_K)


def propose(models, states, limits, **options):
    drafter = DFlashDrafter(models[1], N_TOKENS, **options)
    drafter.take_hidden_states(0, states)
    tree = drafter.propose(PROMPT, limits)
    drafter.reset()
    return tree


def test_a_chain_walks_the_likeliest_transitions(models, states, transitions):
    """As llama.cpp and vLLM walk from the pending token."""
    tokens, scores = transitions
    before, expected = 0, []
    for own, rows in zip(tokens, scores, strict=True):
        before = int(rows[before].argmax())
        expected.append(int(own[before]))
    assert propose(models, states, TreeLimits(16, 16, 1)).token_ids[1:] == expected
    assert expected != tokens[:, 0].tolist()  # nor those that are likeliest by themselves


def test_a_tree_has_the_best_paths(models, states, transitions):
    """Every path of candidates by its product of softmax probabilities; the best nodes of all."""
    tokens, scores = transitions
    log_q = scores - np.logaddexp.reduce(scores, axis=-1, keepdims=True)
    paths, level = [], [((), 0, 0.0)]
    for own, rows in zip(tokens, log_q, strict=True):
        level = [
            ((*path, int(token)), c, above + float(rows[before, c]))
            for path, before, above in level
            for c, token in enumerate(own)
        ]
        paths += level
    best = sorted(paths, key=lambda item: -item[2])[:24]
    tree = propose(models, states, TreeLimits(24, 16, TOP_K))
    drafted = {tuple(tree.tokens_on_path(i)): tree.path_log_probs[i] for i in range(1, len(tree))}
    assert set(drafted) == {path for path, _, _ in best}
    for path, _, log_prob in best:
        assert abs(drafted[path] - log_prob) < 1e-4
    assert max(map(len, drafted)) > 1


def test_limits_bound_the_tree(models, states):
    for limits in (TreeLimits(7, 2, 3), TreeLimits(3, 9, 9), TreeLimits(40, 40, 2)):
        tree = propose(models, states, limits)
        assert 0 < tree.n_drafted <= limits.max_nodes
        assert max(tree.depths) <= min(limits.max_depth, BLOCK_SIZE - 1)
        assert max(len(tree.children(i)) for i in range(len(tree))) <= limits.width


def test_drawn_chains_have_the_transitions_probabilities(models, states, transitions):
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), n_tokens=N_TOKENS)
    rng = np.random.default_rng(3)
    tree = propose(models, states, TreeLimits(4, 4, 1), chain=(sampler, rng))
    tokens, scores = transitions
    before = 0
    for i, token in enumerate(tree.token_ids[1:]):
        row = np.full(N_TOKENS, -np.inf)
        row[tokens[i]] = scores[i, before]
        expected = np.exp(row - np.logaddexp.reduce(row))
        np.testing.assert_allclose(tree.draft_probs[i + 1], expected, atol=1e-5)
        before = tokens[i].tolist().index(token)
    assert tree.n_drafted == 4


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(top_k=3, min_p=0.01)])
def test_candidates_rank_as_in_a_row_of_the_vocabulary(params):
    """With the target's noise and its filters; tokens beyond its vocabulary are none."""
    rng = np.random.default_rng(5)
    token_ids, logits = np.array([8, 95, 3, 96, 41]), rng.normal(0, 3, 5).astype(np.float32)
    row = np.full((1, 100), -np.inf, dtype=np.float32)
    row[0, token_ids] = logits
    noise = TargetNoise(7, 0.8, N_TOKENS)
    ranker = CandidateRanker(N_TOKENS, sharpness=0.5, noise=noise, params=params)
    (expected,) = ranker.rank(row, [12], 4)
    ranked = ranker.rank_among(token_ids, logits, 12, 4)
    assert [token for token, _ in ranked] == [token for token, _ in expected]
    np.testing.assert_allclose([q for _, q in ranked], [q for _, q in expected], atol=1e-5)
    assert ranker.rank_among(np.array([96, 99]), logits[:2], 12, 4) == []


def test_scores_follow_the_token_before():
    rows = np.zeros((2, 6), dtype=np.float32)
    rows[:, :2] = [[4, 9], [1, 7]]
    rows[:, 2:] = [[1, 2, 1, 2], [3, 4, 5, 6]]
    transitions = Transitions(rows, 2)
    assert [x.tolist() for x in transitions.after([])] == [[4, 9], [1, 2]]
    assert [x.tolist() for x in transitions.after([4])] == [[1, 7], [3, 4]]
    assert [x.tolist() for x in transitions.after([9])] == [[1, 7], [5, 6]]
