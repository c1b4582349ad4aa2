"""Part of /openapi.json that follows from the models of requests and responses."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from specdec.serve import requests, responses
from specdec.serve.options import ServeOptions

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_PLACE = "#/components/schemas/{model}"
_REQUESTS = (requests.ChatRequest, requests.CompletionRequest)
_RESPONSES = (
    responses.ErrorResponse,
    responses.Health,
    responses.ModelCard,
    responses.ModelList,
    responses.ChatCompletion,
    responses.Completion,
)
_ERROR_STATUSES = (400, 401, 403, 404, 405, 408, 413, 422, 429, 431, 500, 503)


def _content(model: type[BaseModel]) -> Schema:
    return {"application/json": {"schema": {"$ref": _PLACE.format(model=model.__name__)}}}


def takes(model: type[BaseModel]) -> Schema:
    """Return a route's entry for its requests."""
    return {"requestBody": {"required": True, "content": _content(model)}}


def gives(
    model: type[BaseModel], description: str, status: int = 200, *, is_stream: bool = False
) -> Responses:
    """Return a route's entry for a response. is_stream: it may be sent as events, too."""
    content = _content(model) | ({"text/event-stream": {}} if is_stream else {})
    return {status: {"description": description, "content": content}}


ERRORS: Responses = {
    status: entry
    for code in _ERROR_STATUSES
    for status, entry in gives(responses.ErrorResponse, "An error", code).items()
}


def with_models(schema: Schema, limits: ServeOptions) -> Schema:
    """Return a schema with the models that its routes refer to, and with this server's limits."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "validation") for model in _REQUESTS),
        *((model, "serialization") for model in _RESPONSES),
    ]
    _, made = models_json_schema(modes, ref_template=_PLACE)
    models = schema.setdefault("components", {}).setdefault("schemas", {})
    models.update(made["$defs"])
    maxima = {
        "n": limits.max_choices,
        "best_of": limits.max_choices,
        "max_tokens": limits.max_output_tokens,
        "max_completion_tokens": limits.max_output_tokens,
    }
    for request in _REQUESTS:
        fields = models[request.__name__]["properties"]
        for name in maxima.keys() & fields.keys():
            number, _ = fields[name]["anyOf"]  # or null
            number["maximum"] = maxima[name]
    return schema
