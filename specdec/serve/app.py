"""The routes, and errors of the framework in OpenAI's shape."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request
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
    takes,
    with_requests,
)
from specdec.serve.errors import ApiError, JsonResponse, bad_request, broken
from specdec.serve.gate import READY
from specdec.serve.guard import OPEN_PATH, Guard
from specdec.serve.jobs import chat_job, completion_job, constraint_to_try
from specdec.serve.page import add_page
from specdec.serve.schema import ChatRequest, CompletionRequest, read_request
from specdec.serve.service import Endpoint, Service


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
    app.openapi = lambda: with_requests(told_schema(), service.options)  # type: ignore[method-assign]
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    told = service.metrics.add_request
    return Guard(app, service.options, key, paths, told, is_debug)


def _add_figures(app: FastAPI, service: Service) -> None:
    @app.get(OPEN_PATH, responses=HEALTH)
    async def health() -> Response:
        """starting, ready, failing or draining."""
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
    def chat(body: bytearray) -> ChatRequest:
        request = read_request(body, ChatRequest)
        _check_model(request.model, service)
        return request

    def completion(body: bytearray) -> CompletionRequest:
        request = read_request(body, CompletionRequest)
        _check_model(request.model, service)
        return request

    of_chats = Endpoint(
        lambda body: constraint_to_try(chat(body)),
        lambda body, llm: chat_job(chat(body), llm, service.options),
        lambda job, llm: ChatAnswer(service.name, job, llm.tokenizer),
    )
    of_completions = Endpoint(
        lambda body: None,
        lambda body, llm: completion_job(completion(body), llm, service.options),
        lambda job, llm: CompletionAnswer(service.name, job, llm.tokenizer),
    )

    @app.post("/v1/chat/completions", responses=CHAT, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        _check_content_type(request)
        return await service.answer(request, of_chats)

    @app.post("/v1/completions", responses=COMPLETION, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        _check_content_type(request)
        return await service.answer(request, of_completions)


def _check_content_type(request: Request) -> None:
    """Of other types browsers send what a page of another site wants."""
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (
        kind.startswith("application/") and kind.endswith("+json")
    ):
        raise bad_request("send a JSON object, with Content-Type: application/json")


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

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        """Else the framework tells it as plain text. It comes to the guard all the same."""
        return broken().response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()
