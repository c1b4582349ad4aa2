"""The rules, their draws and the sampler match their definitions."""

from __future__ import annotations

from chain_checks import chain_is_exact
from definitions import (
    drawing_is_right,
    lenient_is_defined,
    match_is_exact,
    residual_is_right,
    sampler_is_defined,
)

from specdec.sampling.sampler import Sampler
from specdec.verification.acceptance import (
    RandomDecisions,
    lenient,
    residual,
    verify_match,
    verify_rejection,
)
from specdec.verification.block import verify_block


def test_the_rules_are_exact() -> None:
    assert match_is_exact(verify_match)
    assert chain_is_exact(verify_rejection)
    assert chain_is_exact(verify_block)


def test_the_lossy_rule_is_as_defined() -> None:
    assert lenient_is_defined(lenient)


def test_draws_and_residual_are_right() -> None:
    assert drawing_is_right(RandomDecisions)
    assert residual_is_right(residual)


def test_the_sampler_is_as_defined() -> None:
    assert sampler_is_defined(Sampler)
