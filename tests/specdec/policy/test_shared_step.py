"""Evidence that sequences of one step share, and the cost of prompts beside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.scenarios.scenario import Clock
from specdec.config import SpecConfig
from specdec.policy.cost_model import CostModel
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.pair_statistics import PairStatistics
from specdec.policy.shared_step import observe_together, should_draft_ahead, trim_together
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

COST = CostModel(read_seconds=1.0, fixed_seconds=0.0, seconds_per_token=0.01)
DRAFT = CostModel(read_seconds=0.01, fixed_seconds=0.0, seconds_per_token=1e-6)


def step_of(num_seqs: int, is_right: bool) -> tuple[PairStatistics, DraftPolicy]:
    """One step in which every draft has one node, accepted or not."""
    clock, pair_statistics = Clock(), PairStatistics(COST, DRAFT, 99)
    policies = [
        DraftPolicy(SpecConfig(("draft",)), pair_statistics, 1000, clock=clock)
        for _ in range(num_seqs)
    ]
    trees = []
    for policy in policies:
        policy.limits(10, 64, 1000, num_seqs)
        tree = DraftTree(0)
        tree.add(0, 1, -0.01)
        tree.n_runs = tree.n_run_nodes = 1
        trees.append(tree)
    clock.now += 0.01
    state_dict = trim_together(policies, trees)
    clock.now += COST.seconds(sum(map(len, state_dict)))
    path = (0, 1) if is_right else (0,)
    outcomes = [Acceptance(path[: len(tree)], 99, is_right) for tree in state_dict]
    observe_together(policies, outcomes, state_dict)
    return pair_statistics, policies[0]


@pytest.mark.parametrize("is_right", [False, True])
def test_a_step_of_equal_sequences_counts_as_one_of_them(is_right: bool) -> None:
    """Budgets are tokens of one sequence: a trial that all make at once is one trial."""
    budgets = []
    for num_seqs in (2, 3):  # which share a choice
        _, policy = step_of(num_seqs, is_right)
        budgets.append(policy.choice.state_dict()["budget"])
    assert budgets[0] == pytest.approx(budgets[1], abs=0.02)


def test_the_plan_shares_the_free_tokens_among_the_sequences() -> None:
    """With 100 free tokens twenty sequences have four draft tokens each, which cost nothing."""
    _, policy = step_of(1, is_right=True)
    for num_seqs in (1, 4, 20):
        assert policy.uses_draft(num_seqs)
    rates = [policy.acceptance_statistics.choice(n).rate for n in (1, 4, 20)]
    assert rates == sorted(rates)
    assert rates[-1] > 3 * 20 / 1.2  # more than three tokens a sequence


def test_single_delayed_passes_count_little() -> None:
    clock, pair_statistics = Clock(), PairStatistics(COST, None, 64)
    policy = DraftPolicy(SpecConfig(("ngram",)), pair_statistics, 1000, clock=clock)
    for i in range(40):
        policy.limits(10, 64, 1000)
        (state_dict,) = trim_together([policy], [DraftTree(0)])
        clock.now += 30.0 if i % 10 == 3 else 1.5
        observe_together([policy], [Acceptance((0,), 99, False)], [state_dict])
    assert pair_statistics.cost.seconds(1) == pytest.approx(1.5, rel=0.15)


def seconds_of_step(n_entering: int, note: Callable[[float], None]) -> None:
    clock, pair_statistics = Clock(), PairStatistics(COST, DRAFT, 64)
    policy = DraftPolicy(SpecConfig(("draft",)), pair_statistics, 1000, clock=clock)
    policy.limits(10, 64, 1000)
    tree = DraftTree(0)
    (state_dict,) = trim_together([policy], [tree], n_entering)
    clock.now += COST.seconds(1 + n_entering)
    record = policy.choice.record
    policy.choice.record = lambda uses, outcome, num_seqs: (  # type: ignore[method-assign]
        note(outcome.seconds), record(uses, outcome, num_seqs)
    )  # fmt: skip
    observe_together([policy], [Acceptance((0,), 99, False)], [state_dict])


def test_prefill_chunks_pay_for_their_own_tokens() -> None:
    actual: list[float] = []
    for n_entering in (0, 100, 900):
        seconds_of_step(n_entering, actual.append)
    assert actual == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("requested", "read_seconds", "uses_draft", "is_ahead"),
    [
        ("auto", 1.0, True, True),
        ("auto", 1.0, False, False),  # the draft is idle
        ("auto", 0.0, True, False),  # in memory both models would compete for the same cores
        ("on", 0.0, True, True),
        ("on", 1.0, False, True),
        ("off", 1.0, True, False),
    ],
)
def test_trees_are_drafted_ahead_where_the_target_streams(
    requested: str, read_seconds: float, uses_draft: bool, is_ahead: bool
) -> None:
    pair_statistics = PairStatistics(replace(COST, read_seconds=read_seconds), DRAFT, 99)
    policies = [
        DraftPolicy(SpecConfig(draft_ahead=requested), pair_statistics, 1000) for _ in range(2)
    ]
    for policy in policies:
        policy.limits(10, 64, 1000, 2)
        policy.step.uses_draft = uses_draft
    assert should_draft_ahead(policies) is is_ahead
    assert [policy.step.is_ahead for policy in policies] == [is_ahead] * 2
