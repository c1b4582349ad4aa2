"""The served schema's part on requests and answers: these are tested against it.

Fields may be added to any of these objects: clients skip those that they do not know.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from specdec.serve.options import ServeOptions
from specdec.serve.schema import ChatRequest, CompletionRequest

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_NULL: Schema = {"type": "null"}


def _object(fields: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "required": list(fields),
        "properties": {**fields, **(optional or {})},
    }


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, _NULL]}


def _one_of(*values: str) -> Schema:
    return {"type": "string", "enum": list(values)}


def _answer(description: str, schema: Schema) -> dict[str, Any]:
    return {"description": description, "content": {"application/json": {"schema": schema}}}


ERROR = _answer(
    "An error",
    _object(
        {
            "error": _object(
                {
                    "message": _STRING,
                    "type": _STRING,
                    "param": _or_null(_STRING),
                    "code": _or_null(_STRING),
                }
            )
        }
    ),
)
_STATUSES = (400, 401, 403, 404, 405, 408, 413, 422, 429, 431, 500, 503)
ERRORS: Responses = dict.fromkeys(_STATUSES, ERROR)

# --- answers of a model ------------------------------------------------------------------------

_USAGE = _object(
    {
        "prompt_tokens": _COUNT,
        "completion_tokens": _COUNT,
        "total_tokens": _COUNT,
        "prompt_tokens_details": _object({"cached_tokens": _COUNT}),
        "completion_tokens_details": _object(
            {
                "accepted_prediction_tokens": _COUNT,
                "rejected_prediction_tokens": _COUNT,
                "reasoning_tokens": _COUNT,
            }
        ),
    }
)
_COUNTS = ("prompt_n", "predicted_n", "draft_n", "draft_n_accepted", "passes", "bytes_streamed")
_FIGURES = (
    "prompt_ms",
    "predicted_ms",
    "predicted_per_second",
    "tokens_per_pass",
    "stall_ms",
)
_TIMINGS = _object({**dict.fromkeys(_COUNTS, _COUNT), **dict.fromkeys(_FIGURES, _NUMBER)})
_TOKEN = {"token": _STRING, "logprob": _NUMBER, "bytes": _list(_COUNT)}
_CHAT_LOGPROBS = _object(
    {"content": _list(_object({**_TOKEN, "top_logprobs": _list(_object(_TOKEN))}))}
)
_COMPLETION_LOGPROBS = _object(
    {
        "tokens": _list(_STRING),
        "token_logprobs": _list(_NUMBER),
        "top_logprobs": _or_null(_list({"type": "object", "additionalProperties": _NUMBER})),
        "text_offset": _list(_COUNT),
    }
)
_CALL = _object(
    {
        "id": _STRING,
        "type": _one_of("function"),
        "function": _object({"name": _STRING, "arguments": _STRING}),
    }
)
_MESSAGE = _object(
    {"role": _one_of("assistant"), "content": _or_null(_STRING)}, {"tool_calls": _list(_CALL)}
)


def _text(kind: str, choice: Schema) -> dict[str, Any]:
    whole = _object(
        {
            "id": _STRING,
            "object": _one_of(kind),
            "created": _COUNT,
            "model": _STRING,
            "system_fingerprint": _STRING,
            "choices": {**_list(choice), "minItems": 1},
            "usage": _USAGE,
            "timings": _TIMINGS,
        }
    )
    told = _answer("The text, or with stream its events", whole)
    told["content"]["text/event-stream"] = {}
    return told


CHAT: Responses = {
    200: _text(
        "chat.completion",
        _object(
            {
                "index": _COUNT,
                "message": _MESSAGE,
                "logprobs": _or_null(_CHAT_LOGPROBS),
                "finish_reason": _one_of("stop", "length", "tool_calls"),
            },
            optional={"finish_note": _STRING},
        ),
    )
}
COMPLETION: Responses = {
    200: _text(
        "text_completion",
        _object(
            {
                "index": _COUNT,
                "text": _STRING,
                "logprobs": _or_null(_COMPLETION_LOGPROBS),
                "finish_reason": _one_of("stop", "length"),
            },
            optional={"finish_note": _STRING},
        ),
    )
}

# --- the server itself -------------------------------------------------------------------------

_CARD = _object(
    {
        "id": _STRING,
        "object": _one_of("model"),
        "created": _COUNT,
        "owned_by": _STRING,
        "max_model_len": _COUNT,
        "has_chat_template": {"type": "boolean"},
    }
)
MODEL: Responses = {200: _answer("The model", _CARD)}
MODELS: Responses = {
    200: _answer("It alone", _object({"object": _one_of("list"), "data": _list(_CARD)}))
}
PLAN: Responses = {200: _answer("As `specdec plan --json` prints it", {"type": "object"})}
HEALTH: Responses = {
    200: _answer("It answers", _object({"status": _one_of("ready")})),
    503: _answer("It does not", _object({"status": _one_of("starting", "failing", "draining")})),
}


# --- requests ----------------------------------------------------------------------------------

_PLACE = "#/components/schemas/{model}"
_REQUESTS: tuple[type[BaseModel], ...] = (ChatRequest, CompletionRequest)


def takes(form: type[BaseModel]) -> dict[str, Any]:
    """A route's part of the schema that says what its requests are."""
    reference = {"$ref": _PLACE.format(model=form.__name__)}
    content = {"application/json": {"schema": reference}}
    return {"requestBody": {"required": True, "content": content}}


def with_requests(schema: Schema, limits: ServeOptions) -> Schema:
    """A served schema that tells what requests are, too, with this server's own limits."""
    _, made = models_json_schema([(form, "validation") for form in _REQUESTS], ref_template=_PLACE)
    forms = schema.setdefault("components", {}).setdefault("schemas", {})
    forms.update(made["$defs"])
    most = {
        "n": limits.max_choices,
        "best_of": limits.max_choices,
        "max_tokens": limits.max_output_tokens,
        "max_completion_tokens": limits.max_output_tokens,
    }
    for request in _REQUESTS:
        fields = forms[request.__name__]["properties"]
        for name in most.keys() & fields.keys():
            number, _ = fields[name]["anyOf"]  # or null
            number["maximum"] = most[name]
    return schema
