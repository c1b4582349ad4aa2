"""Expert eviction: rules replayed over traces of routing, beside the optimum."""

from __future__ import annotations

import numpy as np
import pytest

from offload.experts.eviction import (
    Access,
    ExpertIndex,
    belady,
    decayed_uses,
    least_recently_used,
    replay,
)

N_LAYERS, N_EXPERTS, N_USED = 4, 16, 4


def routed(n_passes: int = 120, seed: int = 0) -> list[Access]:
    """Route with some experts more popular, and those of the last pass more likely."""
    rng = np.random.default_rng(seed)
    liked = rng.dirichlet(np.full(N_EXPERTS, 0.5), N_LAYERS) + 1e-3
    last: dict[int, tuple[int, ...]] = {}
    trace = []
    for _ in range(n_passes):
        for layer in range(N_LAYERS):
            weights = liked[layer].copy()
            weights[list(last.get(layer, ()))] += 0.2
            chosen = rng.choice(N_EXPERTS, N_USED, replace=False, p=weights / weights.sum())
            last[layer] = tuple(int(expert) for expert in sorted(chosen))
            trace.append((layer, last[layer]))
    return trace


@pytest.mark.parametrize("rule", [least_recently_used, decayed_uses])
def test_a_cache_of_all_experts_misses_each_once(rule) -> None:
    trace = routed()
    different = {(layer, expert) for layer, experts in trace for expert in experts}
    n_asked = len(trace) * N_USED
    expected = 1 - len(different) / n_asked
    assert replay(trace, N_LAYERS * N_EXPERTS, rule) == pytest.approx(expected)
    assert belady(trace, N_LAYERS * N_EXPERTS) == pytest.approx(expected)


def test_recency_alone_finds_nothing_below_what_a_pass_asks_for() -> None:
    """The cliff: each pass evicts the experts that the next one needs, just before it does."""
    same = [(layer, tuple(range(N_USED))) for _ in range(50) for layer in range(N_LAYERS)]
    n_slots = N_LAYERS * N_USED - N_USED
    assert replay(same, n_slots, least_recently_used) == 0.0
    assert replay(same, n_slots) > 0.6
    assert belady(same, n_slots) >= replay(same, n_slots)


@pytest.mark.parametrize("n_slots", [8, 32, 48])
def test_uses_are_no_worse_than_recency_and_no_better_than_the_best(n_slots) -> None:
    trace = routed()
    ours, recency = replay(trace, n_slots), replay(trace, n_slots, least_recently_used)
    assert recency - 0.02 <= ours <= belady(trace, n_slots) + 1e-9


def test_what_is_still_wanted_stays() -> None:
    directory = ExpertIndex(2)
    directory.access(0)
    slots = {directory.admit(0, expert, {0, 1, 2}) for expert in (0, 1)}
    assert slots == {0, 1}
    assert directory.admit(0, 2, {0, 1, 2}) is None
    assert directory.admit(0, 2, {1, 2}) == directory_slot(directory, 2)
    assert directory.find(0, 0) is None
    assert directory.find(0, 1) is not None


def directory_slot(directory: ExpertIndex, expert: int) -> int | None:
    return directory.find(0, expert)


def test_a_cache_without_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        ExpertIndex(0)
