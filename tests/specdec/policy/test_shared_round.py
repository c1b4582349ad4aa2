"""What texts that share a round learn from it together, and what prompts beside them pay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from bench.worlds.world import Clock
from specdec.config import SpecConfig
from specdec.policy.cost_model import CostModel
from specdec.policy.draft_policy import DraftPolicy
from specdec.policy.experience import Experience
from specdec.policy.shared_round import observe_together, should_draft_ahead, trim_together
from specdec.verification.acceptance import Acceptance
from specdec.verification.tree import DraftTree

COST = CostModel(read_seconds=1.0, fixed_seconds=0.0, seconds_per_token=0.01)
DRAFT = CostModel(read_seconds=0.01, fixed_seconds=0.0, seconds_per_token=1e-6)


def round_of(n_texts: int, is_right: bool) -> tuple[Experience, DraftPolicy]:
    """One round in which every draft has one node, accepted or not."""
    clock, experience = Clock(), Experience(COST, DRAFT, 99)
    policies = [
        DraftPolicy(SpecConfig(("draft",)), experience, 1000, clock=clock) for _ in range(n_texts)
    ]
    trees = []
    for policy in policies:
        policy.limits(10, 64, 1000, n_texts)
        tree = DraftTree(0)
        tree.add(0, 1, -0.01)
        tree.n_runs = tree.n_run_nodes = 1
        trees.append(tree)
    clock.now += 0.01
    kept = trim_together(policies, trees)
    clock.now += COST.seconds(sum(map(len, kept)))
    path = (0, 1) if is_right else (0,)
    outcomes = [Acceptance(path[: len(tree)], 99, is_right) for tree in kept]
    observe_together(policies, outcomes, kept)
    return experience, policies[0]


@pytest.mark.parametrize("is_right", [False, True])
def test_a_round_of_equal_texts_counts_as_one_of_them(is_right: bool) -> None:
    """Budgets are tokens of one text: a trial that all make at once is one trial."""
    budgets = []
    for n_texts in (2, 3):  # which share a choice
        _, policy = round_of(n_texts, is_right)
        budgets.append(policy.choice.kept()["budget"])
    assert budgets[0] == pytest.approx(budgets[1], abs=0.02)


def test_the_plan_shares_the_free_rows_among_the_texts() -> None:
    """With 100 free rows twenty texts have four draft tokens each, which cost nothing."""
    _, policy = round_of(1, is_right=True)
    for n_texts in (1, 4, 20):
        assert policy.uses_draft(n_texts)
    rates = [policy.lessons.choice(n).rate for n in (1, 4, 20)]
    assert rates == sorted(rates)
    assert rates[-1] > 3 * 20 / 1.2  # more than three tokens a text in little more than the reads


def test_single_passes_that_were_held_up_count_little() -> None:
    clock, experience = Clock(), Experience(COST, None, 64)
    policy = DraftPolicy(SpecConfig(("ngram",)), experience, 1000, clock=clock)
    for i in range(40):
        policy.limits(10, 64, 1000)
        (kept,) = trim_together([policy], [DraftTree(0)])
        clock.now += 30.0 if i % 10 == 3 else 1.5
        observe_together([policy], [Acceptance((0,), 99, False)], [kept])
    assert experience.cost.seconds(1) == pytest.approx(1.5, rel=0.15)


def seconds_of_round(n_entering: int, note: Callable[[float], None]) -> None:
    clock, experience = Clock(), Experience(COST, DRAFT, 64)
    policy = DraftPolicy(SpecConfig(("draft",)), experience, 1000, clock=clock)
    policy.limits(10, 64, 1000)
    tree = DraftTree(0)
    (kept,) = trim_together([policy], [tree], n_entering)
    clock.now += COST.seconds(1 + n_entering)
    record = policy.choice.record
    policy.choice.record = lambda uses, outcome, n_texts: (  # type: ignore[method-assign]
        note(outcome.seconds), record(uses, outcome, n_texts)
    )  # fmt: skip
    observe_together([policy], [Acceptance((0,), 99, False)], [kept])


def test_prompts_that_enter_pay_for_their_own_rows() -> None:
    found: list[float] = []
    for n_entering in (0, 100, 900):
        seconds_of_round(n_entering, found.append)
    assert found == pytest.approx([1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("wanted", "read_seconds", "uses_draft", "is_ahead"),
    [
        ("auto", 1.0, True, True),
        ("auto", 1.0, False, False),  # the draft rests
        ("auto", 0.0, True, False),  # in memory both models would want the same cores
        ("on", 0.0, True, True),
        ("on", 1.0, False, True),
        ("off", 1.0, True, False),
    ],
)
def test_trees_are_drafted_ahead_where_the_target_streams(
    wanted: str, read_seconds: float, uses_draft: bool, is_ahead: bool
) -> None:
    experience = Experience(replace(COST, read_seconds=read_seconds), DRAFT, 99)
    policies = [DraftPolicy(SpecConfig(draft_ahead=wanted), experience, 1000) for _ in range(2)]
    for policy in policies:
        policy.limits(10, 64, 1000, 2)
        policy.round.uses_draft = uses_draft
    assert should_draft_ahead(policies) is is_ahead
    assert [policy.round.is_ahead for policy in policies] == [is_ahead] * 2
