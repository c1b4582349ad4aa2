from __future__ import annotations

import pytest

from specdec.checks import ConfigError
from specdec.config import CHAIN_RULES, SpecConfig, parse_spec_type


def test_spec_types() -> None:
    assert parse_spec_type("ngram,draft") == ("draft", "ngram")
    assert parse_spec_type(None) == parse_spec_type("none") == parse_spec_type([]) == ()
    assert parse_spec_type(["ngram"]) == ("ngram",)
    with pytest.raises(ConfigError, match="eagle"):
        parse_spec_type("draft,eagle")
    with pytest.raises(ConfigError, match="none switches drafting off: name it alone"):
        parse_spec_type("none,draft")


def test_spec_config() -> None:
    config = SpecConfig()
    assert config.drafters == ("draft", "ngram")
    assert config.width > 1
    for acceptance in CHAIN_RULES:
        chain = SpecConfig(acceptance=acceptance)
        assert chain.drafters == ("draft",)
        assert chain.width == 1
        assert chain.draws_chains
    for options in (
        {"acceptance": "maybe"},
        {"acceptance": "rejection", "tree_width": 4},
        {"acceptance": "block", "tree_width": 2},
        {"num_draft_tokens": -1},
        {"num_draft_tokens": 10**6},
        {"tree_width": 0},
        {"draft_depth": 0},
        {"draft_ahead": "maybe"},
    ):
        with pytest.raises(ConfigError):
            SpecConfig(**options)
