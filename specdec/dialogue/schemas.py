"""Types of tools' arguments, for formats that write texts and numbers alike."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

_UNIONS = ("anyOf", "oneOf", "allOf")
_MAX_DEPTH = 16
_TRUE, _FALSE, _NULL = ("true",), ("false",), ("null", "none")


class ArgumentTypes:
    """Types of arguments by the names of a tool and of its argument.

    tools: in OpenAI's form.
    """

    def __init__(self, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        functions = [tool.get("function") or {} for tool in tools]
        self._schemas = {str(each.get("name")): each.get("parameters") or {} for each in functions}

    def __contains__(self, name: str) -> bool:
        return name in self._schemas

    def is_begin(self, text: str) -> bool:
        """Return whether the name of a tool begins with a text."""
        return any(name.startswith(text) for name in self._schemas)

    def types(self, name: str, argument: str) -> frozenset[str]:
        """Return the names of JSON types that an argument may have; none where nothing is known."""
        root = self._schemas.get(name, {})
        properties = root.get("properties") if isinstance(root, Mapping) else None
        schema = properties.get(argument) if isinstance(properties, Mapping) else None
        return frozenset(_types(schema, root, 0))


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> set[str]:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return set()
    reference = schema.get("$ref")
    if isinstance(reference, str):
        return _types(_resolved(reference, root), root, depth + 1)
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set()
    if isinstance(declared, list):
        types |= {name for name in declared if isinstance(name, str)}
    values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
    if not types and isinstance(values, list):
        types |= {_type_of(value) for value in values}
    for union in _UNIONS:
        for member in schema.get(union) or ():
            types |= _types(member, root, depth + 1)
    return types | ({"null"} if types and schema.get("nullable") is True else set())


def _resolved(reference: str, root: Mapping[str, Any]) -> Any:
    """Return the schema that `#/$defs/...` names; None for other references."""
    value: Any = root
    for part in reference.removeprefix("#/").split("/"):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _type_of(value: Any) -> str:
    match value:
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
        case None:
            return "null"
        case list():
            return "array"
    return "object"


def as_json(text: str, types: frozenset[str]) -> str:
    """Return the JSON of an argument that is written without quotes.

    types: those that it may have; with none of them known, JSON is taken for what it says. A text
    that fits no type stays a text.
    """
    plain = text.strip()
    word = plain.lower()
    if "boolean" in types and word in (*_TRUE, *_FALSE):
        return word
    if word in _NULL and ("null" in types or not types):
        return "null"
    value = _parsed(plain)
    if value is not None and (not types or _fits(value, types)):
        return json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False)


def _parsed(text: str) -> Any:
    """Return the value of a JSON text; None where it is none, or a string."""
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    return None if isinstance(value, str) else value


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _fits(value: Any, types: frozenset[str]) -> bool:
    name = _type_of(value)
    return name in types or (name == "number" and "integer" in types)
