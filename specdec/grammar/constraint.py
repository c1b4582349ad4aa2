"""Constraint of a generation as the caller gives it, and its grammar for llguidance."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.distribution import install_command
from specdec.checks import ConfigError, FieldName, check_type
from specdec.grammar.cached import Cached
from specdec.grammar.schema_forms import followable

KINDS = ("json_schema", "json_object", "regex", "grammar")
"""Options of SamplingParams that set a constraint; `json_object` is the schema of any object."""
_ANY_OBJECT = '{"type": "object"}'
_ONE_LINE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""JSON as `json.dumps` writes it. With flexible white space between two tokens no token is forced,
and a confused model writes blanks to the end."""
_OWN_FORM = "x-guidance"  # a schema's own settings, instead of ours; {} allows any white space
_SHORT_ESCAPES = {"json_allowed_escapes": 'bfnrt"\\'}
"""JSON escapes without \\u0061: llguidance compares names as written, so "\\u0061" would not be the
property "a", and its value not what the schema requires of "a"."""
_VALUES = ("const", "default", "enum", "examples")  # keywords whose values are no schemas
_CONTROLS = re.compile(r"\\u00[01]|\\\\x[01]")  # which a schema asks for, and need \u


@dataclass(frozen=True)
class Constraint:
    """A constraint of one of the KINDS, and its text: equal texts allow the same tokens."""

    kind: str
    text: str

    @classmethod
    def among(cls, options: Mapping[str, Any]) -> Constraint | None:
        """Return the constraint set by options of SamplingParams. Raises ConfigError for two."""
        given = [kind for kind in KINDS if options[kind] not in (None, False)]
        if len(given) > 1:
            raise ConfigError(
                *_listed(given),
                " are given, but a request may have one of them: leave the others out",
            )
        for kind in given:
            return cls(kind, _ANY_OBJECT if kind == "json_object" else options[kind])
        return None

    @property
    def grammar(self) -> str:
        """Grammar for an LLMatcher. Raises ConfigError where llguidance cannot follow it.

        Special tokens that a grammar names are looked up later, with a tokenizer.
        """
        return _GRAMMARS(self)

    def refuse(self, reason: object) -> ConfigError:
        """Return the error with the reason, in one line, why the constraint cannot be followed."""
        return ConfigError(FieldName(self.kind), f" cannot be kept to: {in_one_line(str(reason))}")


def _listed(kinds: Sequence[str]) -> list[str]:
    """Return parts of an error message: the names of these options."""
    joined = [[" and ", FieldName(kind)] for kind in kinds]
    return [part for parts in joined for part in parts][1:]


def schema_text(value: Any) -> str | None:
    """Return a JSON schema (object or text) as text; None stays None. Raises ConfigError."""
    check_type("json_schema", value, Mapping, str, type(None))
    if value is None:
        return None
    try:
        schema = json.loads(value) if isinstance(value, str) else value
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            FieldName("json_schema"), f" is no JSON: {in_one_line(str(error))}"
        ) from error
    if not isinstance(schema, Mapping):
        raise ConfigError(FieldName("json_schema"), f" is {text[:40]}, must be an object")
    return text


def llguidance(field: str) -> Any:
    """Import the library for a constraint given in `field`. Raises ConfigError where it is not
    installed."""
    try:
        import llguidance as library
    except ImportError as error:
        raise ConfigError(
            FieldName(field), f" needs llguidance: {install_command('grammar')}"
        ) from error
    return library


def _grammar(constraint: Constraint) -> str:
    matcher = llguidance(constraint.kind).LLMatcher
    try:
        grammar = str(_MAKERS[constraint.kind](matcher, constraint.text))
        is_wrong, messages = matcher.validate_grammar_with_warnings(grammar)
    except RecursionError as error:
        raise constraint.refuse("it is nested too deep") from error
    except ValueError as error:
        raise constraint.refuse(error) from error
    if is_wrong:
        raise constraint.refuse(messages[0])
    return grammar


_GRAMMARS = Cached(_grammar, limit=32)


def _from_schema(matcher: Any, text: str) -> str:
    schema = json.loads(text)
    _check_names(schema)
    form: dict[str, Any] = {} if _OWN_FORM in schema else {**_ONE_LINE}
    if text != _ANY_OBJECT and not _CONTROLS.search(text):
        form |= _SHORT_ESCAPES
    followed = json.dumps(followable(schema))
    return str(matcher.grammar_from_json_schema(followed, defaults=form))


def _check_names(schema: Any) -> None:
    """Raise ValueError where an answer could have fewer names than it must: llguidance counts a
    repeated name twice, unless the schema requires it by name."""
    todo = [schema]
    while todo:
        node = todo.pop()
        if isinstance(node, list):
            todo += node
        elif isinstance(node, dict):
            minimum, required = node.get("minProperties"), node.get("required")
            n_required = len(required) if isinstance(required, list) else 0
            if isinstance(minimum, int | float) and minimum > n_required + 1:
                raise ValueError(
                    f"minProperties is {minimum} beside {n_required} required names, but a name "
                    "that comes twice would count twice: require the names, or ask for fewer"
                )
            todo += [value for key, value in node.items() if key not in _VALUES]


def _from_regex(matcher: Any, text: str) -> str:
    return str(matcher.grammar_from_regex(text))


def _from_grammar(matcher: Any, text: str) -> str:
    """Read llguidance's Lark; llama.cpp's GBNF is recognised by `::=` and translated."""
    from llguidance.gbnf_to_lark import any_to_lark

    try:
        return str(matcher.grammar_from_lark(any_to_lark(text) if "::=" in text else text))
    except Exception as error:  # its parser raises bare Exceptions
        raise ValueError(str(error)) from error


_MAKERS: dict[str, Callable[[Any, str], str]] = {
    "json_schema": _from_schema,
    "json_object": _from_schema,
    "regex": _from_regex,
    "grammar": _from_grammar,
}


def in_one_line(message: str) -> str:
    """Return the reason from a message that may show the place below it."""
    cause = re.findall(r"^error: (.+)$", message, re.MULTILINE)
    lines = cause or [line for line in message.splitlines() if line.strip()] or ["no reason given"]
    return " ".join(lines[0].split())[:300]
