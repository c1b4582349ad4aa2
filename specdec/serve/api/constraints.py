"""The constraint of a request's text: a schema, a regular expression, a grammar or forced calls."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.grammar.constraint import Constraint, llguidance, schema_text
from specdec.serve.api.base import ConstraintFields
from specdec.serve.api.chat import ChatRequest, ObjectFormat, ResponseFormat, SchemaFormat, Tool
from specdec.serve.api.completions import CompletionRequest
from specdec.serve.errors import bad_request

Fields = Mapping[str, Any]


def constraint_fields(
    body: ChatRequest | CompletionRequest, forced_tools: Sequence[Tool] = ()
) -> Fields:
    """Return the constraint as fields of SamplingParams, empty without one.

    forced_tools: tools of which the answer has to call one.

    Raises ApiError for two constraints, ConfigError, also where the extra `grammar` is missing.
    """
    given = [*_of_format(body.response_format), *_of_fields(body)]
    if forced_tools:
        given.append(("tool_choice", "json_schema", _schema_of_calls(forced_tools)))
    if len(given) > 1:
        names = " and ".join(name for name, _, _ in given)
        raise bad_request(f"{names} do not go together: leave one of them out", given[0][0])
    for name, kind, value in given:
        llguidance(name)  # the error names the field as it was sent
        return {kind: schema_text(value) if kind == "json_schema" else value}
    return {}


def constraint_to_try(fields: Fields) -> Constraint | None:
    """Return a client's constraint, which must be tried in another process first.

    None if there is none, or if it is known to be harmless.
    """
    for kind, value in fields.items():
        return None if kind == "json_object" else Constraint(kind, value)
    return None


def _of_format(form: ResponseFormat | None) -> Iterator[tuple[str, str, Any]]:
    """Yield (field's name, kind of constraint, value)."""
    schema = None
    if isinstance(form, SchemaFormat):
        schema = form.json_schema.schema_
    elif isinstance(form, ObjectFormat):
        schema = form.schema_
    if schema is not None:
        yield "response_format", "json_schema", schema
    elif form is not None and form.type != "text":
        yield "response_format", "json_object", True


def _of_fields(body: ConstraintFields) -> Iterator[tuple[str, str, Any]]:
    group = body.structured_outputs
    listed = {
        "json_schema": ("json_schema", body.json_schema),
        "grammar": ("grammar", body.grammar or None),
        "guided_json": ("json_schema", body.guided_json),
        "guided_regex": ("regex", body.guided_regex),
        "guided_grammar": ("grammar", body.guided_grammar),
        "guided_choice": ("regex", _one_of(body.guided_choice)),
        "structured_outputs.json": ("json_schema", group and group.json_),
        "structured_outputs.regex": ("regex", group and group.regex),
        "structured_outputs.grammar": ("grammar", group and group.grammar),
        "structured_outputs.choice": ("regex", _one_of(group.choice if group else None)),
        "structured_outputs.json_object": ("json_object", (group and group.json_object) or None),
    }
    yield from ((name, kind, value) for name, (kind, value) in listed.items() if value is not None)


def _one_of(choices: Sequence[str] | None) -> str | None:
    return None if choices is None else "|".join(f"(?:{re.escape(item)})" for item in choices)


def _schema_of_calls(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the schema of one call of a tool, in Llama 3's form.

    The parser of an output reads that form whatever the model's own is.
    """
    functions = [tool.function for tool in tools if tool.function is not None]
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                "arguments": _document(function.parameters or {"type": "object"}, f"tool:{i}"),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for i, function in enumerate(functions)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _document(schema: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a subschema with an id of its own, so that `#/$defs/...` refers to its own parts."""
    return {"$id": name, **schema}
