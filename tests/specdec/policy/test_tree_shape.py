"""How deep a tree may be while a draft is on trial."""

from __future__ import annotations

import pytest

from specdec.config import SpecConfig
from specdec.policy.acceptance_statistics import AcceptanceStatistics, ModeStatistics
from specdec.policy.cost_model import CostModel
from specdec.policy.modes import DraftChoice
from specdec.policy.tree_shape import TreeShape


@pytest.mark.parametrize(("level_seconds", "depth"), [(0.048, 20), (0.18, 5), (0.6, 1), (0.9, 1)])
def test_a_first_tree_has_the_levels_that_may_all_be_lost(level_seconds, depth):
    """Half of two tokens, which take a second each."""
    acceptance_statistics = AcceptanceStatistics(
        CostModel(1.0, 0.1, 0.001), CostModel(level_seconds, 0.0, 1e-9), 128
    )
    promising = ModeStatistics(lambda num_seqs: DraftChoice((9.0, 1.0), plain_seconds=1.0))
    shape = TreeShape(SpecConfig(), acceptance_statistics, promising, has_model=True)
    assert shape.limits(128, 32, uses_draft=True).max_depth == depth
