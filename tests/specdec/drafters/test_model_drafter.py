"""The tree grown by a draft model, against its own probabilities computed one by one."""

import math
from dataclasses import replace

import numpy as np
import pytest
from alone import own
from transformers import AutoTokenizer

from backends.attention.batch import BLOCK_SIZE
from backends.contract.prefix_cache import PrefixCache
from backends.hf.backend import TorchBackend
from backends.hf.loading import load_hf_model
from specdec.drafters.base import TreeLimits
from specdec.drafters.merged import MergedDrafter
from specdec.drafters.model import ModelDrafter
from specdec.drafters.ngram import NgramDrafter
from specdec.pair import pair_path
from specdec.sampling.context_window import ContextWindow
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import ROOT, DraftTree

CONTEXT = [5, 17, 60, 33, 8]


@pytest.fixture(scope="module")
def backend(checkpoint_factory):
    with TorchBackend.resident(checkpoint_factory("llama", seed=1)) as loaded:
        yield loaded


@pytest.fixture
def drafter(backend):
    made = ModelDrafter(backend, 96)
    made.reset()
    yield made
    made.reset()


def log_probs(backend, tokens):
    """Return log q of the next token after `tokens`, from a fresh prefill."""
    row = own(backend).prefill(tokens).astype(np.float64)
    own(backend).rollback(0)
    return row - np.logaddexp.reduce(row)


def test_log_probs_are_the_drafts_own(backend, drafter):
    tree = drafter.propose(CONTEXT, TreeLimits(24, 5, 4))
    assert tree.n_drafted == 24
    drafter.reset()
    for node in range(1, len(tree)):
        above = CONTEXT + list(tree.tokens_on_path(tree.parents[node]))
        expected = log_probs(backend, above)[tree.token_ids[node]]
        assert math.isclose(tree.log_probs[node], expected, abs_tol=1e-4)


def test_it_is_the_best_tree_of_its_size(backend, drafter):
    """With enough memory for all beams, the nodes are the most probable of the full tree."""
    tree = drafter.propose(CONTEXT, TreeLimits(10, 2, 96))
    drafter.reset()
    first = log_probs(backend, CONTEXT)
    paths = {(t,): first[t] for t in range(96)}
    for t in np.argsort(-first)[:12]:
        second = log_probs(backend, [*CONTEXT, int(t)])
        paths |= {(int(t), u): first[t] + second[u] for u in range(96)}
    best = sorted(paths, key=lambda p: -paths[p])[:10]
    assert {tree.tokens_on_path(i) for i in range(1, 11)} == set(best)


def test_bounds(drafter):
    tree = drafter.propose(CONTEXT, TreeLimits(30, 3, 2))
    assert max(tree.depths) <= 3
    assert all(len(tree.children(i)) <= 2 for i in range(len(tree)))
    drafter.reset()
    assert drafter.propose(CONTEXT, TreeLimits(0, 3, 2)).n_drafted == 0
    assert drafter.propose(CONTEXT, TreeLimits(5, 0, 2)).n_drafted == 0


def test_levels_that_others_propose_too_are_not_run(drafter):
    limits = TreeLimits(8, 8, 1, min_level_probability=1e-9)
    chain = drafter.propose(CONTEXT, limits)
    assert chain.n_runs == 8  # the root's, and one for each level but the last
    drafter.reset()
    known = chain.best_subset(3)
    assert drafter.propose(CONTEXT, replace(limits, known=known)).n_runs == 1
    drafter.reset()
    forced = DraftTree(CONTEXT[-1])
    forced.add(ROOT, chain.token_ids[1], 0.0, "grammar")
    assert drafter.propose(CONTEXT, replace(limits, known=forced)).n_runs == 8
    drafter.reset()
    other = DraftTree(CONTEXT[-1])
    other.add(ROOT, (chain.token_ids[1] + 1) % 96, -0.1, "ngram")
    assert drafter.propose(CONTEXT, replace(limits, known=other)).n_runs == 8


def test_nodes_below_a_committed_path_are_known_from_the_new_root(drafter):
    limits = TreeLimits(8, 8, 1)
    tree = drafter.propose(CONTEXT, limits)
    drafter.observe(Acceptance((0, 1, 2), tree.token_ids[3], is_bonus=True), tree)
    known = DraftTree(tree.token_ids[3])
    for node in range(4, len(tree)):
        known.add(node - 4, tree.token_ids[node], -0.1, "ngram")
    context = CONTEXT + list(tree.tokens_on_path(3))
    more = TreeLimits(16, 16, 1, min_level_probability=1e-9, known=known)
    shorter = drafter.propose(context, more)
    longer = drafter.propose(context, replace(more, known=None))
    assert shorter.n_drafted < longer.n_drafted


def test_accepted_nodes_keep_their_kv(backend, drafter):
    """After a step only tokens new to the draft are computed, and the next tree is the same."""
    tree = drafter.propose(CONTEXT, TreeLimits(24, 6, 2))
    deepest = max(range(len(tree)), key=lambda i: tree.depths[i])
    path = tree.path(deepest)
    drafter.observe(Acceptance(path, 50, is_bonus=True), tree)
    # The prompt, the pending token and the accepted nodes; the last may never have run.
    assert len(CONTEXT) + len(path) - 2 <= drafter._kv.n_committed <= len(CONTEXT) + len(path) - 1
    context = [*CONTEXT, *tree.tokens_on_path(deepest), 50]
    continued = drafter.propose(context, TreeLimits(24, 6, 2))
    assert drafter._kv.n_committed == len(context)
    drafter.reset()
    fresh = drafter.propose(context, TreeLimits(24, 6, 2))
    assert continued.token_ids == fresh.token_ids
    assert np.allclose(continued.log_probs, fresh.log_probs, atol=1e-4)


def test_only_missing_tokens_are_computed_next(backend):
    window = ContextWindow(n_recent=64)
    for drafter in (ModelDrafter(backend, 96), ModelDrafter(backend, 96, window=window)):
        drafter.reset()
        merged = MergedDrafter([NgramDrafter(), drafter])
        assert merged.num_uncomputed(CONTEXT) == len(CONTEXT)
        tree = merged.propose(CONTEXT, TreeLimits(24, 6, 2))
        drafter.observe(Acceptance((0,), 50, is_bonus=True), tree)
        context = [*CONTEXT, 50, 51, 52]  # two more steps without the draft
        n_computed = drafter._kv.n_committed
        # A window may jump with the next token, and half of it is recomputed.
        expected = len(context) - (n_computed if drafter._window.n_recent is None else 0)
        assert merged.num_uncomputed(context) == expected
        drafter.propose(context, TreeLimits(24, 6, 2))
        assert drafter._kv.n_committed - n_computed <= expected
        drafter.reset()


def test_accepted_tokens_of_another_drafter(backend, drafter):
    """If another drafter's branch was accepted, only the common part stays cached."""
    tree = drafter.propose(CONTEXT, TreeLimits(24, 6, 2))
    missing = next(t for t in range(96) if t not in tree.children(0))
    foreign = tree.add(0, missing, -0.5, "ngram")
    drafter.observe(Acceptance((0, foreign), 7, is_bonus=True), tree)
    assert drafter._kv.n_committed == len(CONTEXT)


def test_it_runs_no_more_nodes_than_the_backend_can_hold(backend, monkeypatch):
    monkeypatch.setattr(backend, "max_nodes", 5)
    drafter = ModelDrafter(backend, 96)
    drafter.reset()
    n_run = []
    run = backend.forward

    def noted(batch):
        n_run.extend(len(item.token_ids) for item in batch if item.parents is not None)
        return run(batch)

    monkeypatch.setattr(backend, "forward", noted)
    tree = drafter.propose(CONTEXT, TreeLimits(40, 8, 4))
    drafter.reset()
    assert sum(n_run) == 5
    assert tree.n_drafted > 5  # children of the nodes that have run


@pytest.fixture(scope="module")
def trained():
    """The embedded draft model and a context in which it is sure of its next tokens."""
    folder = pair_path("pair:draft")
    text = "def main():\n    for i in range(10):\n        print(i)\n    for i in range("
    return load_hf_model(folder), AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


def test_cached_sequences_do_not_make_trees_shallow(trained):
    """They are evicted before the nodes of a tree lack memory: a deep one runs many more nodes than
    it proposes."""
    model, context = trained
    limits, n_blocks = TreeLimits(126, 32, 8), 12
    with TorchBackend.kept_in_memory(model, num_kv_slots=n_blocks * BLOCK_SIZE) as backend:
        cache = PrefixCache(backend, n_blocks)
        drafter = ModelDrafter(backend, backend.vocab_size, prefix_cache=cache)
        expected = drafter.propose(context, limits)
        assert expected.n_run_nodes > 2 * limits.max_nodes
        drafter.reset()
        for first in range(2 * n_blocks):
            drafter.propose([first, *context], TreeLimits(1, 1, 1))
            drafter.reset()
        tree = drafter.propose(context, limits)
        assert (tree.token_ids, tree.n_runs) == (expected.token_ids, expected.n_runs)
        drafter.reset()
