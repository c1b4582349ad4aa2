"""Valid constraints, and refusals of invalid ones."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from schemas import PERSON

from specdec.checks import ConfigError
from specdec.sampling.params import SamplingParams

pytest.importorskip("llguidance")

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "objectx"}}, "json_schema cannot be kept to: Invalid type: objectx"),
    ({"json_schema": '{"type":'}, "json_schema is no JSON"),
    ({"json_schema": "[1]"}, "must be an object"),
    ({"json_schema": 7}, "json_schema is 7, must be Mapping or str or None"),
    ({"json_schema": {"type": {1, 2}}}, "json_schema is no JSON"),
    ({"json_schema": {"not": {"type": "string"}}}, "Unimplemented keys"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)"}}, "look-around"),
    ({"json_schema": {"type": "integer", "minimum": 3, "maximum": 1}}, "Unsatisfiable"),
    ({"json_schema": {"$ref": "http://a/b"}}, "does not fetch"),
    ({"json_schema": {"minProperties": 2}}, "a name that comes twice would count twice"),
    ({"json_schema": {"anyOf": [{"required": ["a"], "minProperties": 3}]}}, "minProperties is 3"),
    ({"regex": "[a"}, "regex cannot be kept to: unclosed character class"),
    ({"regex": 3}, "regex is 3"),
    ({"grammar": 'start: "a" x'}, "grammar cannot be kept to: at 1(8): unknown name"),
    ({"grammar": ""}, "grammar cannot be kept to: Empty grammar"),
    ({"grammar": "root ::= ("}, "grammar cannot be kept to"),
    ({"json_object": "yes"}, "json_object is 'yes'"),
    ({"json_object": True, "regex": "a"}, "json_object and regex are given"),
    ({"regex": "a", "num_beams": 2}, "num_beams is 2, which does not go with regex"),
    ({"regex": "a", "ignore_eos": True}, "ignore_eos is True"),
    ({"regex": "a", "forced_bos_token_id": 3}, "forced_bos_token_id is 3"),
    ({"regex": "a", "forced_eos_token_id": 3}, "forced_eos_token_id is"),
]


@pytest.mark.parametrize(("options", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_limits_that_cannot_be_enforced_are_refused_in_one_line(
    options: dict[str, Any], part: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(**options)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "schema",
    [
        {"minProperties": 1},
        {"required": ["a", "b"], "minProperties": 3},
        {"const": {"minProperties": 9}},
        {"properties": {"minProperties": {"const": 9}}},
    ],
)
def test_names_that_cannot_be_counted_twice_may_be_counted(schema: dict[str, Any]) -> None:
    assert SamplingParams(json_schema=schema).constraint is not None


def test_a_schema_is_stored_as_text_so_that_parameters_stay_hashable() -> None:
    as_object = SamplingParams(json_schema=PERSON)
    as_text = SamplingParams(json_schema=json.dumps(PERSON, indent=2))
    assert as_object == as_text
    assert hash(as_object) == hash(as_text)
    assert as_object.replace(seed=1).json_schema == as_text.json_schema


def test_an_empty_expression_is_one_and_no_option_at_all_is_none() -> None:
    assert SamplingParams(regex="").constraint is not None
    assert SamplingParams(json_object=False).constraint is None


def test_both_grammar_notations() -> None:
    assert SamplingParams(grammar='start: "a" | "b"').constraint is not None
    assert SamplingParams(grammar='root ::= "a" | "b"').constraint is not None


def test_without_the_library_the_error_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['llguidance'] = None\n"
        "from specdec.sampling.params import SamplingParams\n"
        "SamplingParams(temperature=0.5)\n"
        "SamplingParams(regex='a')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    error = done.stderr.splitlines()[-1].partition(": ")[2]
    assert error == "regex needs llguidance: pip install 'specdec-stream[grammar]'"
