"""Whole steps of a sequence and the model drafter on tables: equal to plain decoding, and exact."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from controller_checks import CHECKS, rounds_error

from specdec.config import CHAIN_RULES

EXACT = 1e-12


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_two_rounds_of_a_rule_for_chains_are_exact(rule: str) -> None:
    assert rounds_error(rule) <= EXACT


@pytest.mark.parametrize("check", CHECKS)
def test_rounds_are_as_defined(check: Callable[[], bool]) -> None:
    assert check()
