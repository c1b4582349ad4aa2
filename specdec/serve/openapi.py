"""Part of /openapi.json that follows from the models of requests and responses."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from specdec.serve import responses
from specdec.serve.api import budget, messages_answer, ollama_answer, responses_answer, tokens
from specdec.serve.api.base import RequestModel
from specdec.serve.errors import AnthropicError, OllamaError
from specdec.serve.options import ServeOptions

Schema = dict[str, Any]
Responses = dict[int | str, dict[str, Any]]

_PLACE = "#/components/schemas/{model}"
_RESPONSES = (
    responses.ErrorResponse,
    responses.Health,
    responses.ModelCard,
    responses.ModelList,
    responses.ChatCompletion,
    responses.Completion,
    responses_answer.ResponseObject,
    messages_answer.AnthropicResponse,
    messages_answer.TokenCount,
    ollama_answer.OllamaChatResponse,
    ollama_answer.OllamaGenerateResponse,
    ollama_answer.OllamaModels,
    ollama_answer.OllamaShow,
    ollama_answer.OllamaVersion,
    tokens.TokenizeResponse,
    tokens.DetokenizeResponse,
    tokens.TemplateResponse,
    tokens.Properties,
    budget.BudgetResponse,
    AnthropicError,
    OllamaError,
)
_ERROR_STATUSES = (400, 401, 403, 404, 405, 408, 413, 422, 429, 431, 500, 503)


def _content(model: type[BaseModel]) -> Schema:
    return {"application/json": {"schema": {"$ref": _PLACE.format(model=model.__name__)}}}


def takes(model: type[BaseModel]) -> Schema:
    """Return a route's entry for its requests."""
    return {"requestBody": {"required": True, "content": _content(model)}}


def gives(
    model: type[BaseModel], description: str, status: int = 200, *, stream_type: str = ""
) -> Responses:
    """Return a route's entry for a response. stream_type: media type of its stream, if any."""
    content = _content(model) | ({stream_type: {}} if stream_type else {})
    return {status: {"description": description, "content": content}}


def errors_of(model: type[BaseModel]) -> Responses:
    """Return a route's entries for its errors."""
    return {
        status: entry
        for code in _ERROR_STATUSES
        for status, entry in gives(model, "An error", code).items()
    }


ERRORS = errors_of(responses.ErrorResponse)


def _requests() -> list[type[BaseModel]]:
    """Return the models of all requests: those of routes, and what these are made of."""
    todo: list[type[RequestModel]] = [RequestModel]
    for model in todo:
        todo += model.__subclasses__()
    return list(dict.fromkeys(todo[1:]))


def with_models(schema: Schema, limits: ServeOptions) -> Schema:
    """Return a schema with the models that its routes refer to, and with this server's limits."""
    modes: list[tuple[type[BaseModel], JsonSchemaMode]] = [
        *((model, "validation") for model in _requests()),
        *((model, "serialization") for model in _RESPONSES),
    ]
    _, made = models_json_schema(modes, ref_template=_PLACE)
    models = schema.setdefault("components", {}).setdefault("schemas", {})
    models.update(made["$defs"])
    maxima = {"n": limits.max_choices, "best_of": limits.max_choices}
    for request in _requests():
        fields = models[request.__name__]["properties"]
        for name in maxima.keys() & fields.keys():
            number, _ = fields[name]["anyOf"]  # or null
            number["maximum"] = maxima[name]
    return schema
