"""JSON schemas as zod and pydantic write them, in forms that llguidance can follow.

Each form has the same values, or (`_with_discriminator`) those of them that name their kind.
llguidance refuses `propertyNames`, `not` and formats that it does not know.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]

_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = (
    "items additionalItems additionalProperties unevaluatedItems unevaluatedProperties contains "
    "propertyNames if then else not"
).split()
_MAX_NAME = 1000
"""Maximum length of a property's name, if the schema limits it on one side alone."""
_ANNOTATIONS = frozenset("title description default examples deprecated $comment".split())

_KNOWN_FORMATS = frozenset(
    "date-time time date duration email hostname ipv4 ipv6 uuid uri unknown".split()
)
"""llguidance's."""
_FREE_FORMATS = frozenset("binary password path file-path directory-path".split())
"""Formats of any text: they say what a program does with it."""
_UUID = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}"
_OTHER_NAMES = {"url": "uri", "guid": "uuid"}
_HEX = "[0-9a-f]"
_BASE64 = "(?:[0-9A-Za-z+/]{4})*(?:[0-9A-Za-z+/]{2}==|[0-9A-Za-z+/]{3}=)?"
_FORMAT_PATTERNS = {
    "base64": _BASE64,
    "base64url": "[A-Za-z0-9_-]*",
    "jwt": r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*",
    "e164": r"\+[1-9][0-9]{6,14}",
    **{
        f"uuid{n}": f"{_HEX}{{8}}-{_HEX}{{4}}-{n}{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"
        for n in range(1, 9)
    },
}
"""Patterns of further formats of zod and pydantic."""
_PATTERNS_OF_NAMES = {**_FORMAT_PATTERNS, "uuid": _UUID}
_WEEKS = "[0-9]+W"
_DAYS = "([0-9]+Y([0-9]+M)?([0-9]+D)?|[0-9]+M([0-9]+D)?|[0-9]+D)"
_SECONDS = "[0-9]+([.,][0-9]+)?S"
_HOURS = f"T([0-9]+H([0-9]+M)?({_SECONDS})?|[0-9]+M({_SECONDS})?|{_SECONDS})"
_DOMAIN = r"@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
_PATTERNS = {
    # zod's of an email
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]" + _DOMAIN: (
        r"^([A-Za-z0-9_'+\-]+\.)*[A-Za-z0-9_'+\-]*[A-Za-z0-9_+\-]" + _DOMAIN
    ),
    # pydantic's of a Decimal
    r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)$",
    # zod's of a duration
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$": f"^P({_WEEKS}|{_DAYS}({_HOURS})?|{_HOURS})$",
}
"""Patterns with look-around, which no automaton follows, and the same ones without."""


def followable(schema: Any) -> Any:
    """Return a schema with the same values that llguidance may follow; what it still refuses, it
    refuses by name."""
    return _form(schema, schema)


def _form(schema: Any, root: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    form = {key: _part(key, value, root) for key, value in schema.items()}
    if _is_any(form.get("not")):
        return False
    if form.get("uniqueItems") is False:
        del form["uniqueItems"]
    if form.get("minContains") == 0 and "maxContains" not in form:
        form = {key: form[key] for key in form if key not in ("contains", "minContains")}
    return _with_names(_with_discriminator(_with_text(form), root), root)


def _part(key: str, value: Any, root: Any) -> Any:
    """Return the value of a keyword, with the forms of the schemas in it."""
    if key in _MAPS and isinstance(value, dict):
        return {name: _form(item, root) for name, item in value.items()}
    if key in _LISTS and isinstance(value, list):
        return [_form(item, root) for item in value]
    return _form(value, root) if key in _SINGLE else value


def _is_any(schema: Any) -> bool:
    """Return whether a schema has every value."""
    return schema is True or (isinstance(schema, dict) and schema.keys() <= _ANNOTATIONS)


# --- strings -------------------------------------------------------------------------------------


def _with_text(schema: Schema) -> Schema:
    """Write patterns and formats of strings as llguidance takes them. A format that it does not
    know says no more than the pattern beside it."""
    kind, pattern = schema.get("format"), schema.get("pattern")
    if isinstance(pattern, str):
        schema = {**schema, "pattern": _PATTERNS.get(pattern, pattern)}
    if not isinstance(kind, str) or kind in _KNOWN_FORMATS:
        return schema
    rest = {key: value for key, value in schema.items() if key != "format"}
    if kind in _OTHER_NAMES:
        return {**rest, "format": _OTHER_NAMES[kind]}
    parts = [schema, *_list(schema.get("allOf"))]
    has_pattern = any("pattern" in part for part in parts if isinstance(part, dict))
    if kind in _FREE_FORMATS or has_pattern:
        return rest
    if kind == "ipvanyaddress" and "anyOf" not in rest:
        return {**rest, "anyOf": [{"format": "ipv4"}, {"format": "ipv6"}]}
    if kind in _FORMAT_PATTERNS:
        return {**rest, "pattern": f"^{_FORMAT_PATTERNS[kind]}$"}
    return schema


# --- names of properties -------------------------------------------------------------------------


def _with_names(schema: Schema, root: Any) -> Schema:
    """Say `propertyNames` by the properties that there may be, as zod's records do."""
    if "propertyNames" not in schema:
        return schema
    names = _resolved(schema["propertyNames"], root)
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True:
        return rest
    if not isinstance(names, dict) or names.get("type", "string") != "string":
        return schema
    said = names.keys() - _ANNOTATIONS - {"type"}
    if not said:
        return rest
    remaining = rest.get("additionalProperties", True)
    if "patternProperties" in rest or "unevaluatedProperties" in rest:
        return schema
    if said <= {"enum", "const"}:
        return _of_listed_names(rest, remaining, _listed(names))
    pattern = _pattern_of_names(names, said)
    if pattern is None or rest.get("properties"):
        return schema
    return {**rest, "patternProperties": {pattern: remaining}, "additionalProperties": False}


def _listed(names: Mapping[str, Any]) -> list[str]:
    listed = _list(names.get("enum", [names.get("const")]))
    return [name for name in listed if isinstance(name, str) and name == names.get("const", name)]


def _of_listed_names(schema: Schema, remaining: Any, names: list[str]) -> Schema:
    given = _properties(schema)
    allowed = {name: given.get(name, remaining) for name in names}
    refused = {name: False for name in given if name not in allowed}
    return {**schema, "properties": {**allowed, **refused}, "additionalProperties": False}


def _pattern_of_names(names: Mapping[str, Any], said: set[str]) -> str | None:
    pattern, kind = names.get("pattern"), names.get("format")
    if isinstance(pattern, str) and said <= {"pattern", "format"}:
        return pattern
    if said == {"format"} and isinstance(kind, str) and kind in _PATTERNS_OF_NAMES:
        return f"^{_PATTERNS_OF_NAMES[kind]}$"
    if said <= {"minLength", "maxLength"}:
        first, last = names.get("minLength", 0), names.get("maxLength", _MAX_NAME)
        if type(first) is type(last) is int and 0 <= first <= last <= _MAX_NAME:
            return rf"^[\s\S]{{{first},{last}}}$"
    return None


# --- unions --------------------------------------------------------------------------------------


def _with_discriminator(schema: Schema, root: Any) -> Schema:
    """Require the property that tells the kinds of a `oneOf` apart, where it has a default."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or len(branches) < 2:
        return schema
    resolved = [_resolved(branch, root) for branch in branches]
    name = next(filter(lambda name: _tells_apart(name, resolved), _properties(resolved[0])), None)
    if name is None:
        return schema
    return {
        **schema,
        "oneOf": [_requiring(name, b, r) for b, r in zip(branches, resolved, strict=True)],
    }


def _requiring(name: str, branch: Schema, resolved: Schema) -> Schema:
    required = _list(resolved.get("required"))
    if name in required:
        return branch
    if branch is not resolved:  # a reference, which remaining may have, too
        return {"allOf": [branch, {"required": [name]}]}
    return {**branch, "required": [*required, name]}


def _tells_apart(name: str, branches: list[Any]) -> bool:
    values: list[Any] = []
    for branch in branches:
        own = _properties(branch).get(name)
        if not isinstance(own, dict) or not {"const", "enum"} & own.keys():
            return False
        values += [own["const"]] if "const" in own else _list(own["enum"])
    names = [value for value in values if isinstance(value, str)]
    return 0 < len(names) == len(values) == len(set(names))


def _list(value: Any) -> list[Any]:
    """Return a list; an empty one for what llguidance will refuse."""
    return value if isinstance(value, list) else []


def _properties(schema: Any) -> Mapping[str, Any]:
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return properties if isinstance(properties, dict) else {}


def _resolved(schema: Any, root: Any) -> Any:
    """Follow a reference into the schema's own definitions, once."""
    if not isinstance(schema, dict) or schema.keys() - _ANNOTATIONS != {"$ref"}:
        return schema
    match = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(schema["$ref"]))
    definitions = root.get(match[1]) if match else None
    return definitions.get(match[2], schema) if match and isinstance(definitions, dict) else schema
