"""Whole rounds of the decoder of a text and the model drafter on tables: equal, and exact.

The same checks must fail copies of both with one mistake each: tests/mutants/test_controller.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from controller_checks import CHECKS, rounds_error

from specdec.config import CHAIN_RULES
from specdec.decoding.rounds.text_decoder import TextDecoder
from specdec.drafters.model import ModelDrafter

EXACT = 1e-12


@pytest.mark.parametrize("rule", CHAIN_RULES)
def test_two_rounds_of_a_rule_for_chains_are_exact(rule: str) -> None:
    assert rounds_error(TextDecoder, ModelDrafter, rule) <= EXACT


@pytest.mark.parametrize("check", CHECKS)
def test_rounds_are_as_defined(check: Callable[..., bool]) -> None:
    assert check(TextDecoder, ModelDrafter)
