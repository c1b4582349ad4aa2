"""How many nodes are free, and what bounds a tree."""

import pytest

from specdec.config import SpecConfig
from specdec.policy import MAX_AUTO_NODES, DraftPolicy, PassCost


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
    [(10, 64, 16), (10, 5, 4), (10, 1, 0), (95, 64, 5), (100, 64, 0)],
)
def test_depth_stays_within_context_and_tokens_wanted(context, wanted, depth):
    cost = PassCost(read_seconds=1.0, row_free_seconds=0.0, seconds_per_row=0.01)
    assert DraftPolicy(SpecConfig(), cost, 100).limits(context, wanted).max_depth == depth
