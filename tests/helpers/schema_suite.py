"""JSON schemas of a public test suite (tests/schemas), and a model's answers to them.

Most of the suite's say nothing of values of other types than their own: `{"minItems": 1}` is
content with any number, and a model may always take the way out. So such a schema is asked for a
second time, narrowed to the type that it speaks of.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError
from jsonschema.validators import extend

from specdec.api import LLM

SUITE = Path(__file__).parents[1] / "schemas" / "draft2020-12.jsonl"
GREEDY: dict[str, Any] = {}
SAMPLED = {"temperature": 0.7, "seed": 3}
_KEYWORDS = {
    "object": "properties required additionalProperties patternProperties propertyNames "
    "minProperties maxProperties dependentRequired dependentSchemas unevaluatedProperties",
    "array": "items prefixItems minItems maxItems contains uniqueItems unevaluatedItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
_TYPES = {keyword: kind for kind, words in _KEYWORDS.items() for keyword in words.split()}


@dataclass(frozen=True)
class Schema:
    name: str
    value: dict[str, Any] = field(hash=False)
    is_narrowed: bool = False


def read_schemas() -> list[Schema]:
    """Return all variants of the suite's schemas."""
    lines = map(json.loads, SUITE.read_text(encoding="utf-8").splitlines())
    return [variant for line in lines for variant in variants(Schema(line["name"], line["schema"]))]


def variants(schema: Schema) -> list[Schema]:
    """Return the schema, and a form narrowed to its own type if it admits others."""
    kind = None if "type" in schema.value else _type_spoken_of(schema.value)
    if kind is None:
        return [schema]
    return [schema, replace(schema, value={**schema.value, "type": kind}, is_narrowed=True)]


def _type_spoken_of(value: Any) -> str | None:
    if not isinstance(value, dict):
        return None
    own = (_TYPES[keyword] for keyword in value if keyword in _TYPES)
    parts = [part for key in ("allOf", "anyOf", "oneOf") for part in value.get(key, ())]
    return next(own, None) or next(filter(None, map(_type_spoken_of, parts)), None)


class Digits(float):
    """A number of an answer with all its digits as written."""

    def __init__(self, text: str) -> None:
        self.exact = Fraction(text)


def is_valid(schema: dict[str, Any], text: str) -> bool | None:
    """Judge an answer; None if `jsonschema` cannot read the schema (its patterns are Python's).

    The package's own multipleOf divides floats, by which 0.0508 is no multiple of 0.0001.
    """

    def multiple_of(judge: Any, factor: float, value: Any, _: Any) -> Iterator[Any]:
        if not judge.is_type(value, "number"):
            return
        exact = value.exact if isinstance(value, Digits) else Fraction(value)
        if exact % Fraction(repr(factor)):
            yield ValidationError(f"{value} is not a multiple of {factor}")

    judge = extend(Draft202012Validator, {"multipleOf": multiple_of})(schema)
    value = json.loads(text, parse_float=Digits)
    try:
        return bool(judge.is_valid(value))
    except Exception:
        return None


@dataclass(frozen=True)
class Answer:
    """An answer beside plain constrained decoding's; is_valid is None for one that is cut off."""

    name: str
    is_narrowed: bool
    token_ids: Sequence[int]
    plain_ids: Sequence[int]
    is_valid: bool | None


def answer(llm: LLM, schema: Schema, max_tokens: int, sampling: dict[str, Any]) -> Answer:
    prompt = f"# A value of this JSON schema: {json.dumps(schema.value)}\nvalue = "
    # JSON comes in one line, so its end ends the output: few models know when to end a number.
    ends = {*llm.tokenizer.eos_token_ids, *llm.tokenizer.encode("\n")}
    keywords = {
        "json_schema": schema.value,
        "max_tokens": max_tokens,
        "eos_token_ids": tuple(sorted(ends)),
        **sampling,
    }
    plain = llm.generate(prompt, speculative=False, **keywords)
    actual = llm.generate(prompt, **keywords)
    valid = is_valid(schema.value, actual.text) if actual.finish_reason == "stop" else None
    return Answer(schema.name, schema.is_narrowed, actual.token_ids, plain.token_ids, valid)


def spread(schemas: Sequence[Schema], n: int) -> list[Schema]:
    """Choose n of them, equally far apart: files group those of one keyword."""
    return [schemas[i * len(schemas) // n] for i in range(n)]
