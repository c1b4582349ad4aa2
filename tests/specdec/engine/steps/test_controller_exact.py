"""Whole steps of a sequence and the model drafter on tables: equal to plain decoding, exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from controller_checks import CHECKS, steps_error

from specdec.config import CHAIN_RULES

EXACT = 1e-12


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_two_steps_of_a_chain_rule_are_exact(rule: str) -> None:
    assert steps_error(rule) <= EXACT


@pytest.mark.slow_except(1)
@pytest.mark.parametrize("check", CHECKS)
def test_steps_are_as_defined(check: Callable[[], bool]) -> None:
    assert check()
