"""Schemas of zod and pydantic: followed, or refused by the name of what llguidance lacks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import llguidance
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, FormatChecker

from specdec.checks import ConfigError
from specdec.grammar.schema_forms import followable
from specdec.pair import pair_path
from specdec.sampling.params import SamplingParams
from specdec.text.tokenizer import Tokenizer

FILE = Path(__file__).parents[2] / "schemas" / "clients.jsonl"
CASES = [json.loads(line) for line in FILE.read_text(encoding="utf-8").splitlines()]
FOLLOWED = [case for case in CASES if "refused" not in case]
REFUSED = [case for case in CASES if "refused" in case]
OF_DISCRIMINATOR = ("pydantic: disc", "pydantic: listdisc")
"""A kind that has a default is required here."""


@cache
def tokenizer() -> tuple[Tokenizer, Any]:
    words = Tokenizer.from_pretrained(pair_path("pair:target"))
    return words, words.grammar_tokenizer(words.eos_token_ids)


def accepts(schema: dict[str, Any], value: Any) -> bool:
    words, own = tokenizer()
    constraint = SamplingParams(json_schema=schema).constraint
    assert constraint is not None
    matcher = llguidance.LLMatcher(own, constraint.grammar, log_level=0)
    ids = words.encode(json.dumps(value), add_special_tokens=False)
    return bool(matcher.consume_tokens(ids) and matcher.is_accepting())


def is_valid(schema: dict[str, Any], value: Any) -> bool:
    return bool(Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(value))


@pytest.mark.parametrize("case", FOLLOWED, ids=lambda case: case["name"])
def test_values_are_the_schemas(case: dict[str, Any]) -> None:
    assert case["valid"]
    assert case["invalid"]
    for value in case["valid"]:
        assert is_valid(case["schema"], value)
        assert accepts(case["schema"], value), value
    for value in case["invalid"]:
        assert not accepts(case["schema"], value), value


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case["name"])
def test_what_llguidance_cannot_follow_is_refused_by_name(case: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(json_schema=case["schema"])
    assert case["refused"] in str(caught.value)
    assert "\n" not in str(caught.value)


KEYWORDS = (
    "properties propertyNames enum const oneOf allOf not required format pattern kind $ref type "
    "minLength maxLength contains minContains uniqueItems additionalProperties"
).split()
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 5) | st.sampled_from(["a", "string", "uuid", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYWORDS), inner, max_size=4)
    ),
)
KEYS = st.sampled_from(["oneOf", "propertyNames", "format"])


@given(schema=st.dictionaries(KEYS, VALUES) | VALUES)
def test_what_is_no_schema_is_left_to_llguidance(schema: Any) -> None:
    json.dumps(followable(schema))


def test_a_deep_schema_is_refused_in_one_line() -> None:
    deep: dict[str, Any] = {}
    for _ in range(600):
        deep = {"items": deep}
    with pytest.raises(ConfigError, match="json_schema") as caught:
        SamplingParams(json_schema=deep)
    assert "\n" not in str(caught.value)


def test_a_schema_without_such_keywords_stays_as_it_is() -> None:
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "$defs": {"A": {}}}
    assert followable(schema) == schema
    assert followable(True) is True
