"""The routes, and errors of the framework in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from specdec import __version__
from specdec.serve.answers import ChatAnswer, CompletionAnswer
from specdec.serve.described import (
    CHAT,
    COMPLETION,
    ERRORS,
    HEALTH,
    MODEL,
    MODELS,
    PLAN,
    with_limits,
)
from specdec.serve.errors import ApiError, JsonResponse, bad_request, broken
from specdec.serve.gate import READY
from specdec.serve.guard import OPEN_PATH, Guard
from specdec.serve.jobs import chat_job, completion_job, trial
from specdec.serve.page import add_page
from specdec.serve.schema import ChatRequest, CompletionRequest, Sampling
from specdec.serve.service import Service


def make_app(service: Service, key: str | None, *, is_debug: bool = False) -> ASGIApp:
    """The application, behind its guard."""
    app = FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,  # to wherever the Host header says
    )
    _add_figures(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    add_page(app)
    _add_errors(app)
    told_schema = app.openapi
    app.openapi = lambda: with_limits(told_schema(), service.options)  # type: ignore[method-assign]
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    told = service.metrics.add_request
    return Guard(app, service.options, key, paths, told, is_debug)


def _add_figures(app: FastAPI, service: Service) -> None:
    @app.get(OPEN_PATH, responses=HEALTH)
    async def health() -> Response:
        """starting, ready or draining."""
        state = service.gate.state
        return JsonResponse({"status": state}, 200 if state == READY else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/plan", responses=PLAN)
    async def plan() -> Response:
        """What lies where in memory, and the predicted speed."""
        return JsonResponse(service.llm.llm.plan.to_dict())


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": service.name,
            "object": "model",
            "created": service.created,
            "owned_by": "specdec",
            "max_model_len": service.llm.llm.max_context,
            "has_chat_template": service.has_chat_template,
        }

    @app.get("/v1/models", responses=MODELS)
    async def models() -> Response:
        return JsonResponse({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}", responses=MODEL)
    async def model(name: str) -> Response:
        _check_model(name, service)
        return JsonResponse(card())


def _add_completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/chat/completions", responses=CHAT)
    async def chat_completions(body: ChatRequest, request: Request) -> Response:
        _check_model(body.model, service)
        return await service.answer(
            request,
            trial(body),
            lambda llm: chat_job(body, llm, service.options),
            lambda job, llm: ChatAnswer(service.name, job, llm.tokenizer),
            **_streaming(body),
        )

    @app.post("/v1/completions", responses=COMPLETION)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        _check_model(body.model, service)
        return await service.answer(
            request,
            None,
            lambda llm: completion_job(body, llm, service.options),
            lambda job, llm: CompletionAnswer(service.name, job, llm.tokenizer),
            **_streaming(body),
        )


def _streaming(body: Sampling) -> dict[str, bool]:
    wanted = body.stream_options
    return {
        "is_streamed": bool(body.stream),
        "has_usage": wanted is not None and bool(wanted.include_usage),
    }


def _check_model(name: str | None, service: Service) -> None:
    if name not in (None, service.name):
        raise ApiError(
            404,
            f"there is no such model here, only {service.name} (--alias gives it another name)",
            param="model",
            code="model_not_found",
        )


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def told(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> Response:
        return _describe(error).response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        """Else the framework tells it as plain text. It comes to the guard all the same."""
        return broken().response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()


def _describe(error: RequestValidationError) -> ApiError:
    """The first mistake; never what the client wrote, but for names of fields."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"] if part != "body"]
    if first["type"] == "json_invalid":
        return bad_request("the body is no JSON")
    if not place:
        return bad_request("send a JSON object, with Content-Type: application/json")
    param = ".".join(place)[:200]
    if first["type"] == "union_tag_invalid":  # its own message repeats what was written
        return bad_request(f"{param}.type must be one of {first['ctx']['expected_tags']}", param)
    return bad_request(f"{param}: {first['msg']}", param)
