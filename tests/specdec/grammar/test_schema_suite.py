"""Answers to the JSON schemas of a public test suite, judged by the `jsonschema` package."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import specdec
from specdec.api import LLM
from specdec.checks import ConfigError
from specdec.sampling.params import SamplingParams

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

import schema_suite as suite

SCHEMAS = suite.read_schemas()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with specdec.load("pair:target", "pair:draft", ctx_size=1024) as loaded:
        yield loaded


def refusal_of(schema: suite.Schema) -> str | None:
    try:
        SamplingParams(json_schema=schema.value)
    except ConfigError as error:
        return str(error)
    return None


REFUSALS = {schema: refusal_of(schema) for schema in SCHEMAS}
TAKEN = [schema for schema, refusal in REFUSALS.items() if refusal is None]


def test_two_hundred_schemas_are_taken_and_the_others_refused_in_one_line() -> None:
    assert sum(not schema.is_narrowed for schema in SCHEMAS) == 436
    assert sum(not schema.is_narrowed for schema in TAKEN) >= 200
    for refusal in filter(None, REFUSALS.values()):
        assert refusal.startswith("json_schema cannot be kept to: ")
        assert "\n" not in refusal


@pytest.mark.slow
def test_complete_answers_are_valid_and_all_are_plain_decodings(llm: LLM) -> None:
    some = suite.spread(TAKEN, 20)
    actual = [
        suite.answer(llm, schema, 32, sampling)
        for schema in some
        for sampling in (suite.GREEDY, suite.SAMPLED)
    ]
    assert {item.is_narrowed for item in actual} == {False, True}
    assert [item for item in actual if item.token_ids != item.plain_ids] == []
    assert [item for item in actual if item.is_valid is False] == []
    assert sum(item.is_valid is True for item in actual) > 30


@pytest.mark.parametrize(
    ("schema", "text", "valid"),
    [
        ({"multipleOf": 0.0001}, "0.0508", True),
        ({"multipleOf": 0.0001}, "0.05081", False),
        ({"multipleOf": 2}, '"7"', True),
        ({"type": "array"}, "null", False),
        ({"pattern": r"^\p{Letter}$"}, '"a"', None),
    ],
)
def test_the_judge(schema: dict[str, Any], text: str, valid: bool | None) -> None:
    assert suite.is_valid(schema, text) is valid
