"""Small JSON schemas, and the check of a value against them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

LETTERS = st.text(alphabet="abcxyz", min_size=1, max_size=5)
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "occupation": {"enum": ["astronaut", "astronomer"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "likes": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["occupation", "age", "likes"],
    "additionalProperties": False,
}
"""A schema with much forced text, whose answers all end."""


def _bounded_integers() -> st.SearchStrategy[dict[str, Any]]:
    bounds = st.tuples(st.integers(-50, 50), st.integers(0, 200))
    return bounds.map(lambda b: {"type": "integer", "minimum": b[0], "maximum": b[0] + b[1]})


def _objects(
    inner: st.SearchStrategy[dict[str, Any]],
) -> st.SearchStrategy[dict[str, Any]]:
    def made(properties: dict[str, Any], is_optional: bool) -> dict[str, Any]:
        required = list(properties)[: len(properties) - is_optional]
        closed = {"type": "object", "additionalProperties": False}
        return {**closed, "properties": properties, "required": required}

    return st.builds(made, st.dictionaries(LETTERS, inner, max_size=3), st.booleans())


def schemas() -> st.SearchStrategy[dict[str, Any]]:
    """Return a strategy for schemas whose values all have bounded length."""
    leaves = st.one_of(
        _bounded_integers(),
        st.just({"type": "boolean"}),
        st.just({"type": "null"}),
        st.lists(LETTERS, min_size=1, max_size=3, unique=True).map(lambda some: {"enum": some}),
        st.integers(0, 4).map(lambda n: {"type": "string", "maxLength": n}),
    )
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            _objects(inner),
            st.tuples(inner, st.integers(0, 2)).map(
                lambda drawn: {"type": "array", "items": drawn[0], "maxItems": drawn[1]}
            ),
            st.lists(inner, min_size=1, max_size=2).map(lambda some: {"anyOf": some}),
        ),
        max_leaves=4,
    )


def conforms(value: Any, schema: dict[str, Any]) -> bool:
    """Check a value, for the keywords that are used above."""
    if "anyOf" in schema:
        return any(conforms(value, option) for option in schema["anyOf"])
    if "enum" in schema:
        return value in schema["enum"]
    return _CHECKS[schema["type"]](value, schema)


def _is_object(value: Any, schema: dict[str, Any]) -> bool:
    known = schema["properties"]
    return (
        isinstance(value, dict)
        and set(schema["required"]) <= set(value) <= set(known)
        and all(conforms(inner, known[name]) for name, inner in value.items())
    )


_CHECKS: dict[str, Callable[[Any, dict[str, Any]], bool]] = {
    "integer": lambda v, s: type(v) is int and s["minimum"] <= v <= s["maximum"],
    "boolean": lambda v, s: isinstance(v, bool),
    "null": lambda v, s: v is None,
    "string": lambda v, s: isinstance(v, str) and len(v) <= s["maxLength"],
    "array": lambda v, s: (
        isinstance(v, list)
        and len(v) <= s["maxItems"]
        and all(conforms(inner, s["items"]) for inner in v)
    ),
    "object": _is_object,
}
