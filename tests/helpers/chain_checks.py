"""Properties of every chain rule: exact distributions, and the ends of sequences and chains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from exact_rules import Case, chain_error, chain_of, make_case, outcomes, table_rows, top_p_rows

CAUGHT = 1e-6  # far above rounding, far below the error of any mutant here
CASES = (
    Case(4, 3, top_p_rows(table_rows(4, seed=31), 0.85), table_rows(4, seed=77)),
    make_case(4, 2, seed=5, kind="zeros"),
    make_case(3, 2, seed=6, kind="same"),
)
STOPS = frozenset({1})


def chain_is_exact(walk: Callable[..., Any]) -> bool:
    """Check the emitted distribution, also where a sequence or a chain ends early."""
    errors = [chain_error(walk, case) for case in CASES]
    errors.append(chain_error(walk, CASES[0], lambda tokens: tokens[-1:] == (2,)))
    errors.append(chain_error(walk, CASES[0], max_tokens=2, stop_tokens=STOPS))
    return max(errors) <= CAUGHT and _chain_outcomes_are_right(walk)


def _chain_outcomes_are_right(walk: Callable[..., Any]) -> bool:
    """Check that nothing follows the end of a sequence, unknown tokens are refused, and names."""
    row = np.array([0.25, 0.75])
    same = Case(2, 3, lambda prefix: row, lambda prefix: row)  # all are accepted
    tree = chain_of((0, 1, 0), same.draft)
    for limit, stops, n_emitted in (
        *((limit, frozenset(), min(limit, 4)) for limit in (1, 2, 3, 4, 5)),
        (4, STOPS, 2),
        (1, STOPS, 1),
    ):
        for item, _ in outcomes(walk, tree, same, max_tokens=limit, stop_tokens=stops):
            emitted, is_whole = item.emitted(tree), n_emitted == 4
            if emitted[:3] != (0, 1, 0)[:n_emitted] or len(emitted) != n_emitted:
                return False
            if item.is_bonus != is_whole or item.n_accepted != n_emitted - 1:
                return False
    wide = np.array([0.2, 0.3, 0.5])
    outside = chain_of((2,), lambda prefix: wide)
    narrow = Case(2, 1, lambda prefix: row, lambda prefix: wide)
    return not any(outcome.n_accepted for outcome, _ in outcomes(walk, outside, narrow))
