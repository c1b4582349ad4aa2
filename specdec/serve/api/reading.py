"""Parsing of a body. Errors name the field, and the limit that was broken."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from specdec.serve.api.base import Lenient, RequestModel
from specdec.serve.errors import ApiError, bad_request

_R = TypeVar("_R", bound=RequestModel)
_DISCRIMINATED = "response_format"  # behind which pydantic puts the type, as if it were a field


def read_request(body: bytes | bytearray, form: type[_R]) -> _R:
    """Return a validated request. Its ApiError repeats names of fields and limits, not values."""
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise bad_request("the body is no JSON") from error
    request = validated(value, form)
    request.check_unknown()
    return request


def validated(value: Any, form: type[_R]) -> _R:
    """Return a request of a JSON value. Raises ApiError."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        raise _api_error(error) from error


def _api_error(error: ValidationError) -> ApiError:
    """Return the deepest error: of several types that a value may have, the client meant the one
    that it matches furthest, and rather the one whose limit it breaks."""

    def key(item: Mapping[str, Any]) -> tuple[int, bool]:
        return len(item["loc"]), not item["type"].endswith(("_type", "literal_error"))

    deepest = max(error.errors(include_url=False, include_input=False), key=key)
    param = ".".join(_place(deepest["loc"]))[:200]
    if not param:
        return bad_request("send a JSON object")
    if deepest["type"] == "union_tag_invalid":  # its own message repeats what was written
        return bad_request(f"{param}.type must be one of {deepest['ctx']['expected_tags']}", param)
    reason = _REASONS.get(deepest["type"], lambda context: deepest["msg"])
    return bad_request(f"{param}: {reason(deepest.get('ctx', {}))}", param)


_REASONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "too_long": lambda context: (
        f"{context['actual_length'] or 'more'} given, this server takes at most "
        f"{context['max_length']}"
    ),
    "too_short": lambda context: f"needs at least {context['min_length']}",
    "string_too_long": lambda context: f"is longer than {context['max_length']} characters",
    "greater_than_equal": lambda context: f"must be at least {context['ge']:g}",
    "greater_than": lambda context: f"must be above {context['gt']:g}",
    "less_than_equal": lambda context: f"must be at most {context['le']:g}",
}


def _place(location: Sequence[str | int]) -> list[str]:
    """Leave out pydantic's names of union members."""
    return [
        str(part)
        for before, part in zip(("", *location), location, strict=False)
        if isinstance(part, int) or (part in _fields(Lenient) and before != _DISCRIMINATED)
    ]


@cache
def _fields(form: type[BaseModel]) -> frozenset[str]:
    own = {field.alias or name for name, field in form.model_fields.items()}
    return frozenset(own).union(*(_fields(subclass) for subclass in form.__subclasses__()))
