"""Free nodes, bounds of a tree, and the part of a tree worth verifying."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from exact_rules import Case, chain_error, table_rows

from bench.scenarios.scenario import Clock
from specdec.config import SpecConfig
from specdec.drafters.base import TreeLimits
from specdec.drafters.merged import merge_trees
from specdec.policy.assumptions import ASSUMED_LEVEL_ACCEPTANCE
from specdec.policy.cost_model import CostModel
from specdec.policy.draft_policy import MAX_AUTO_NODES, DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.policy.shared_step import observe_together, trim_together
from specdec.verification.acceptance import Acceptance, verify_rejection
from specdec.verification.block import verify_block
from specdec.verification.tree import DraftTree

FREE = CostModel(read_seconds=9.0, fixed_seconds=0.0, seconds_per_token=0.001)
DRAFT = CostModel(read_seconds=0.01, fixed_seconds=0.0, seconds_per_token=1e-6)


def new_policy(
    config: SpecConfig, cost: CostModel, draft_cost: CostModel | None = None, **keywords: Any
) -> DraftPolicy:
    pair_statistics = PairStatistics(
        cost, draft_cost, min(cost.num_free_tokens - 1, MAX_AUTO_NODES)
    )
    return DraftPolicy(config, pair_statistics, 1000, **keywords)


def test_an_explicit_number_is_not_changed():
    assert new_policy(SpecConfig(), FREE).n_nodes == MAX_AUTO_NODES
    assert new_policy(SpecConfig(num_draft_tokens=500), FREE).n_nodes == 500
    assert new_policy(SpecConfig(num_draft_tokens=0), FREE).n_nodes == 0


@pytest.mark.parametrize(
    ("context", "requested", "depth"),
    [(10, 64, 32), (10, 5, 4), (10, 1, 0), (95, 64, 5), (100, 64, 0)],
)
def test_depth_stays_within_context_and_tokens_wanted(context, requested, depth):
    cost = CostModel(read_seconds=1.0, fixed_seconds=0.0, seconds_per_token=0.01)
    policy = DraftPolicy(SpecConfig(), PairStatistics(cost, None, 99), 100)
    assert policy.limits(context, requested, 1000).max_depth == depth


def test_a_tree_has_no_more_nodes_than_fit_the_target():
    policy = new_policy(SpecConfig(), FREE)
    assert policy.limits(10, 64, num_free_slots=9).max_nodes == 8
    assert policy.limits(10, 64, num_free_slots=1).max_nodes == 0


def test_a_slow_draft_is_asked_for_fewer_levels():
    cost = CostModel(read_seconds=2.0, fixed_seconds=0.1, seconds_per_token=0.1)

    def depth(level_seconds: float) -> int:
        draft_cost = CostModel(level_seconds, 0.0, 1e-9)
        return new_policy(SpecConfig(), cost, draft_cost).depth

    depths = [depth(seconds) for seconds in (1e-4, 0.05, 0.5, 5.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == SpecConfig().depth
    assert depths[-1] == 1
    # The best depth by hand, for levels of half a second: 1 + a + ... + a^d over 2 + d / 2.
    a = ASSUMED_LEVEL_ACCEPTANCE
    rates = {d: sum(a**k for k in range(d + 1)) / (2 + d / 2) for d in range(1, 33)}
    assert depths[2] == max(rates, key=lambda d: rates[d])


def test_levels_of_a_block_cost_nothing():
    """A head that fills a block is run once, whatever the depth of the tree."""
    cost, slow = FREE, CostModel(2.0, 0.0, 1e-6)
    block = replace(slow, block_size=16)
    assert new_policy(SpecConfig(), cost, slow).depth < SpecConfig().depth
    assert new_policy(SpecConfig(), cost, block).depth == SpecConfig().depth

    def length(draft_cost: CostModel) -> int:
        return new_policy(CHAIN, cost, draft_cost).limits(10, 64, 1000).max_nodes

    assert length(block) > length(slow) > 0


def test_running_the_prompt_does_not_count_against_the_draft():
    clock = Clock()
    policy = new_policy(SpecConfig(("draft",)), FREE, DRAFT, clock=clock)
    assert policy.limits(10, 64, 1000).max_nodes
    tree = DraftTree(0)
    node = tree.add(0, 1, -0.1)
    tree.n_runs = tree.n_run_nodes = 1
    clock.now += 100.0  # as long as eleven passes
    (state_dict,) = trim_together([policy], [tree])
    clock.now += FREE.seconds(len(state_dict))
    observe_together([policy], [Acceptance((0, node), 99, True)], [state_dict])
    assert policy.limits(12, 64, 1000).max_nodes


def test_a_fixed_depth_is_respected():
    policy = new_policy(SpecConfig(draft_depth=7), CostModel(2.0, 0.1, 0.1), DRAFT)
    assert policy.depth == 7
    limits = policy.limits(10, 64, 1000)
    assert (limits.max_depth, limits.min_level_probability) == (7, 0.0)


def test_each_acceptance_rule_has_its_own_statistics() -> None:
    """A lower threshold accepts more of the same draft's tokens."""
    cost, clock = CostModel(0.0, 1.0, 0.1), Clock()
    pair_statistics = PairStatistics(cost, DRAFT, 8)
    likely = DraftTree(0)
    likely.add(0, 1, -0.1)

    def num_retained(threshold: float | None, n_steps: int = 1) -> int:
        """Return the retained nodes of a likely tree, after steps in which such trees failed."""
        config = SpecConfig(accept_threshold=threshold)
        policy = DraftPolicy(config, pair_statistics, 1000, clock=clock)
        for _ in range(n_steps):
            policy.limits(10, 64, 1000)
            (state_dict,) = trim_together([policy], [likely])
            clock.now += cost.seconds(len(state_dict))
            observe_together([policy], [Acceptance((0,), 99, False)], [state_dict])
        return state_dict.n_drafted

    assert num_retained(0.1) == 1
    assert num_retained(0.1, n_steps=40) == 0
    assert (num_retained(0.1), num_retained(None), num_retained(0.5)) == (0, 1, 1)


# --- verified part of a tree ----------------------------------------------------------------------


def unlikely_chain() -> DraftTree:
    tree, node = DraftTree(0), 0
    for token in range(6):
        node = tree.add(node, token, -9.0)
    return tree


def test_a_number_that_the_user_fixed_is_respected():
    cost = CostModel(0.0, 0.1, 1.0)
    policy = new_policy(SpecConfig(num_draft_tokens=6, tree_width=3), cost, DRAFT)
    tree = unlikely_chain()
    for _ in range(50):  # however often it fails
        limits = policy.limits(10, 64, 1000)
        assert (limits.max_nodes, limits.width) == (6, 3)
        assert limits.min_level_probability == 0.0
        assert trim_together([policy], [tree])[0] is tree
        observe_together([policy], [Acceptance((0,), 99, False)], [tree])


def test_what_is_not_worth_its_row_is_cut():
    policy = new_policy(SpecConfig(), CostModel(0.0, 1.0, 0.1))
    policy.limits(10, 64, 1000)
    assert trim_together([policy], [unlikely_chain().best_subset(4)])[0].n_drafted == 0


def test_tokens_of_n_grams_are_no_gain_of_a_level():
    def levels(*more: int) -> tuple[float, ...]:
        policy, tree, node = new_policy(SpecConfig(), FREE, DRAFT), DraftTree(0), 0
        for token in (1, 2, 3):
            node = tree.add(node, token, -1.0)
        node = 0
        for token in more:
            node = tree.add(node, token, -0.1, "ngram")
        policy.limits(10, 64, 1000)
        trim_together([policy], [tree])
        return policy.acceptance_statistics.levels.means

    assert levels(4, 5, 6) == levels() != (0.0,)


@pytest.mark.parametrize("is_proposed", [False, True])
def test_a_level_that_n_grams_propose_is_no_evidence(is_proposed: bool):
    policy = new_policy(SpecConfig(), FREE, DRAFT)
    drafted, looked_up = DraftTree(0), DraftTree(0)
    drafted.add(0, 1, -0.1)
    looked_up.add(looked_up.add(0, 1, -0.1, "ngram"), 2, -0.1, "ngram")
    policy.limits(10, 64, 1000)
    trim_together([policy], [merge_trees([drafted, looked_up]) if is_proposed else drafted])
    assert (policy.acceptance_statistics.levels.means == (0.0,)) == is_proposed


def test_a_slow_first_pass_does_not_make_drafting_look_cheap_for_long():
    clock = Clock()
    policy = new_policy(SpecConfig(), FREE, DRAFT, clock=clock)

    def step(max_tokens: int, tree: DraftTree, seconds: float) -> None:
        policy.limits(10, max_tokens, 1000)
        trim_together([policy], [tree])
        clock.now += seconds
        observe_together([policy], [Acceptance((0,), 99, False)], [tree], 0.5 * seconds)

    step(1, DraftTree(0), 25.0)  # the last token is never drafted
    for _ in range(20):
        step(64, unlikely_chain(), 9.0)
    assert policy.choice.plain_seconds == pytest.approx(9.0, rel=0.02)


def test_a_slow_first_pass_in_memory_is_not_what_plain_decoding_takes():
    clock, cost = Clock(), CostModel(0.0, 1.0, 0.01)
    policy = new_policy(SpecConfig(), cost, DRAFT, clock=clock)
    policy.pair_statistics.cost.observe(1, 3.0)
    for _ in range(10):
        policy.limits(10, 64, 1000)
        policy.step.num_tokens, policy.step.drafted_at = 16, clock.now
        clock.now += 1.16
        observe_together([policy], [Acceptance((0,), 99, False)], [unlikely_chain()])
    assert policy.choice.plain_seconds < 1.5


# --- chains of the rejection rule -----------------------------------------------------------------

CHAIN = SpecConfig(("draft",), acceptance="rejection")


def test_a_drawn_chain_is_never_cut_and_never_stopped_by_its_own_tokens():
    policy = new_policy(CHAIN, CostModel(0.0, 1.0, 0.1), DRAFT)
    limits = policy.limits(10, 64, 1000)
    assert limits.width == 1
    assert limits.min_level_probability == 0.0
    tree = unlikely_chain()
    assert trim_together([policy], [tree])[0] is tree


def test_the_length_of_a_chain_follows_the_fate_of_earlier_ones():
    def length(n_accepted: int) -> int:
        clock = Clock()
        policy = new_policy(CHAIN, FREE, CostModel(0.8, 0.0, 1e-6), clock=clock)
        limits = TreeLimits(0, 0, 1)
        for _ in range(150):
            limits = policy.limits(10, 64, 1000)
            tree, node = DraftTree(0), 0
            for token in range(limits.max_nodes):
                node = tree.add(node, token, -1.0)
                tree.n_runs += 1
                tree.n_run_nodes += 1
            clock.now += 0.8 * tree.n_runs
            (tree,) = trim_together([policy], [tree])
            clock.now += FREE.seconds(len(tree))
            n = min(n_accepted, tree.n_drafted)
            observe_together(
                [policy], [Acceptance(tuple(range(n + 1)), 99, n == tree.n_drafted)], [tree]
            )
        return limits.max_nodes

    assert length(1) < length(4) < length(20)


@pytest.mark.parametrize("rule", [verify_rejection, verify_block])
def test_cutting_drawn_tokens_would_change_the_distribution(rule):
    """The reason, exactly, over all chains and decisions. A length fixed beforehand is harmless."""
    case = Case(3, 2, table_rows(3, 1), table_rows(3, 2))

    def cut_afterwards(tree, *args, **options):
        n = 2 if tree.path_log_probs[2] > math.log(0.2) else 1
        return rule(tree.subset(range(n + 1)), *args, **options)

    def shorter_from_the_start(tree, *args, **options):
        return rule(tree.subset(range(2)), *args, **options)

    assert chain_error(rule, case) < 1e-12
    assert chain_error(shorter_from_the_start, case) < 1e-12
    assert chain_error(cut_afterwards, case) > 1e-3
