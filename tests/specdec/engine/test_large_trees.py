"""Trees of 1 024 nodes: lossless as small ones, in few levels, without quadratic work."""

from __future__ import annotations

import numpy as np
import pytest
from alone import own
from exact_targets import exact_resident
from generating import RandomDrafter, run

from backends.contract.backend import PREFIX
from backends.contract.nodes import NodeTable
from backends.hf.backend import TorchBackend
from specdec.config import MAX_DRAFT_TOKENS, SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.drafters.candidates import CandidateRanker
from specdec.drafters.frontier import level_width
from specdec.drafters.model import ModelDrafter

PROMPT = [3, 17, 5, 60, 41, 8, 22, 9]
SPEC = SpecConfig(num_draft_tokens=MAX_DRAFT_TOKENS, draft_depth=8)


@pytest.fixture(scope="module")
def target(checkpoint_factory):
    with exact_resident(checkpoint_factory("llama")) as backend:
        yield backend


@pytest.fixture(scope="module")
def draft(checkpoint_factory):
    with TorchBackend.resident(checkpoint_factory("llama", seed=1)) as backend:
        yield backend


class Counting(ModelDrafter):
    """Record the proposed trees."""

    def propose(self, context_ids, limits):
        tree = super().propose(context_ids, limits)
        self.proposed = tree
        return tree


def test_greedy_output_is_the_targets_own(target, draft) -> None:
    plain = run(target, PROMPT, 12)
    drafter = Counting(draft, 96, ranker=CandidateRanker(96, sharpness=8.0))
    assert run(target, PROMPT, 12, drafter, spec=SPEC) == plain


def test_a_random_tree_of_that_size(target) -> None:
    plain = run(target, PROMPT, 10)
    assert run(target, PROMPT, 10, RandomDrafter(96), spec=SPEC) == plain


def test_every_node_has_the_logits_of_its_own_path(target, draft) -> None:
    """A thousand rows in chunks: some of them against the chain of their path."""
    drafter = Counting(draft, 96, ranker=CandidateRanker(96, sharpness=8.0))
    own(draft).rollback(0)
    tree = drafter.propose(PROMPT, TreeLimits(1023, 12, 8))
    assert len(tree) == 1024
    assert tree.n_runs <= 12 + 1024 // level_width(1023) + 1
    own(target).rollback(0)
    own(target).prefill(PROMPT[:-1])
    first = own(target).next_node_id
    ids, logits = own(target).extend(
        tree.token_ids, [PREFIX if p < 0 else first + p for p in tree.parents]
    )
    deepest = int(np.argmax(tree.depths))
    for node in (0, 500, 1023, deepest):
        own(target).rollback(len(PROMPT) - 1)
        expected = own(target).prefill([tree.token_ids[i] for i in tree.path(node)])
        assert np.array_equal(logits[node], expected)
    assert len(ids) == 1024


def test_the_table_of_nodes_at_that_size() -> None:
    """A chain of 1 024 nodes sees itself and all above, and can be committed as a whole."""
    table = NodeTable()
    table.add([PREFIX, *range(1023)], [5] * 1024)
    assert (table.visible() == np.tri(1024, dtype=bool)).all()
    assert table.commit(list(range(1024))) == list(range(1024))
    assert (table.n_committed, len(table)) == (1024, 0)
