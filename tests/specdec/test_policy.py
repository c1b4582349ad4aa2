"""How many nodes are free, and what bounds a tree."""

import pytest

from specdec.config import SpecConfig
from specdec.policy import ASSUMED_LEVEL_ACCEPTANCE, MAX_AUTO_NODES, DraftPolicy, PassCost


def test_nodes_are_free_while_reading_takes_longer():
    cost = PassCost(read_seconds=2.0, row_free_seconds=0.5, seconds_per_row=0.05)
    assert cost.free_rows() == 30
    assert cost.seconds(30) == pytest.approx(2.0)
    assert cost.seconds(40) == pytest.approx(2.5)
    assert DraftPolicy(SpecConfig(), cost, 1000).n_nodes == 29


def test_a_resident_target_gets_a_small_tree():
    cost = PassCost(read_seconds=0.0, row_free_seconds=1.0, seconds_per_row=0.1)
    assert cost.free_rows() == 6  # half as long again as one row's pass


def test_auto_is_bounded_and_an_explicit_number_is_not_changed():
    cost = PassCost(read_seconds=9.0, row_free_seconds=0.0, seconds_per_row=0.001)
    assert DraftPolicy(SpecConfig(), cost, 1000).n_nodes == MAX_AUTO_NODES
    assert DraftPolicy(SpecConfig(num_draft_tokens=500), cost, 1000).n_nodes == 500
    assert DraftPolicy(SpecConfig(num_draft_tokens=0), cost, 1000).n_nodes == 0


@pytest.mark.parametrize(
    ("context", "wanted", "depth"),
    [(10, 64, 32), (10, 5, 4), (10, 1, 0), (95, 64, 5), (100, 64, 0)],
)
def test_depth_stays_within_context_and_tokens_wanted(context, wanted, depth):
    cost = PassCost(read_seconds=1.0, row_free_seconds=0.0, seconds_per_row=0.01)
    assert DraftPolicy(SpecConfig(), cost, 100).limits(context, wanted, 1000).max_depth == depth


def test_a_tree_has_no_more_nodes_than_the_target_has_room_for():
    cost = PassCost(read_seconds=9.0, row_free_seconds=0.0, seconds_per_row=0.001)
    policy = DraftPolicy(SpecConfig(), cost, 1000)
    assert policy.limits(10, 64, node_room=33).max_nodes == 32
    assert policy.limits(10, 64, node_room=1).max_nodes == 0


def test_a_slow_draft_is_asked_for_fewer_levels():
    cost = PassCost(read_seconds=2.0, row_free_seconds=0.1, seconds_per_row=0.1)

    def depth(level_seconds: float) -> int:
        draft_cost = PassCost(level_seconds, 0.0, 1e-9)
        return DraftPolicy(SpecConfig(), cost, 1000, draft_cost).depth

    depths = [depth(seconds) for seconds in (1e-4, 0.05, 0.5, 5.0)]
    assert depths == sorted(depths, reverse=True)
    assert depths[0] == SpecConfig().depth
    assert depths[-1] == 1
    # The best depth by hand, for levels of half a second: 1 + a + ... + a^d over 2 + d / 2.
    a = ASSUMED_LEVEL_ACCEPTANCE
    rates = {d: sum(a**k for k in range(d + 1)) / (2 + d / 2) for d in range(1, 33)}
    assert depths[2] == max(rates, key=lambda d: rates[d])


def test_a_fixed_depth_is_kept():
    cost, slow = PassCost(2.0, 0.1, 0.1), PassCost(9.0, 0.0, 1e-9)
    assert DraftPolicy(SpecConfig(draft_depth=7), cost, 1000, slow).depth == 7


@pytest.mark.parametrize(
    ("mode", "streams", "has_draft", "expected"),
    [
        ("on", False, False, True),
        ("off", True, True, False),
        ("auto", True, True, True),
        ("auto", False, True, False),
        ("auto", True, False, False),
    ],
)
def test_when_to_draft_ahead(mode, streams, has_draft, expected):
    cost = PassCost(2.0 if streams else 0.0, 0.1, 0.1)
    policy = DraftPolicy(SpecConfig(draft_ahead=mode), cost, 100, cost if has_draft else None)
    assert policy.should_draft_ahead() is expected


@pytest.mark.parametrize(
    ("context", "wanted", "depth"), [(10, 64, 15), (10, 9, 8), (10, 1, 0), (95, 64, 5)]
)
def test_ahead_reaches_one_more_tree_and_no_further_than_the_text(context, wanted, depth):
    cost = PassCost(read_seconds=1.0, row_free_seconds=0.0, seconds_per_row=0.01)
    policy = DraftPolicy(SpecConfig(draft_depth=7), cost, 100)
    assert policy.limits(context, wanted, 1000).max_ahead_depth == depth
