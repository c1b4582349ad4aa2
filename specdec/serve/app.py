"""Routes, the page at /, and the framework's errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from specdec import __version__
from specdec.serve.admission import READY
from specdec.serve.answers import ChatAnswer, CompletionAnswer
from specdec.serve.errors import ApiError, bad_request, broken
from specdec.serve.jobs import chat_job, completion_job, constraint_to_try
from specdec.serve.middleware import OPEN_PATH, LimitMiddleware
from specdec.serve.openapi import ERRORS, Responses, gives, takes, with_models
from specdec.serve.requests import ChatRequest, CompletionRequest, read_request
from specdec.serve.responses import (
    ChatCompletion,
    Completion,
    Health,
    JsonResponse,
    ModelCard,
    ModelList,
)
from specdec.serve.service import Endpoint, Service

_TEXT = "The text, or with stream its events"
_CHAT = gives(ChatCompletion, _TEXT, is_stream=True)
_COMPLETION = gives(Completion, _TEXT, is_stream=True)
_HEALTH = gives(Health, "Ready") | gives(Health, "Not ready", 503)
_PLAN: Responses = {200: {"description": "The plan, as `specdec plan --json` prints it"}}

_FOLDER = Path(__file__).parent / "page"
_FILES = {
    "/": ("index.html", "text/html"),
    "/page/style.css": ("style.css", "text/css"),
    "/page/script.js": ("script.js", "text/javascript"),
}
_HEADERS = {
    # Only these three files and this server; generated text that looks like HTML stays text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def make_app(service: Service, key: str | None, *, is_debug: bool = False) -> ASGIApp:
    """Return the application, behind its middleware."""
    app = FastAPI(
        title="specdec",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        responses=ERRORS,
        redirect_slashes=False,  # a redirect would go where the Host header says
    )
    _add_status(app, service)
    _add_models(app, service)
    _add_completions(app, service)
    _add_page(app)
    _add_errors(app)
    routes_schema = app.openapi
    app.openapi = lambda: with_models(routes_schema(), service.options)  # type: ignore[method-assign]
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))
    on_end = service.metrics.add_request
    return LimitMiddleware(app, service.options, key, paths, on_end, is_debug)


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get(OPEN_PATH, responses=_HEALTH)
    async def health() -> Response:
        """Return the state: starting, ready, failing or draining."""
        state = service.limiter.state
        return JsonResponse(Health(status=state), 200 if state == READY else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/plan", responses=_PLAN)
    async def plan() -> Response:
        """Return the memory plan and the predicted speed."""
        return JsonResponse(service.llm.llm.plan.to_dict())


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> ModelCard:
        return ModelCard(
            id=service.name,
            object="model",
            created=service.created,
            owned_by="specdec",
            max_model_len=service.llm.llm.max_context,
            has_chat_template=service.has_chat_template,
        )

    @app.get("/v1/models", responses=gives(ModelList, "The only model"))
    async def models() -> Response:
        return JsonResponse(ModelList(object="list", data=[card()]))

    @app.get("/v1/models/{name:path}", responses=gives(ModelCard, "The model"))
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

    @app.post("/v1/chat/completions", responses=_CHAT, openapi_extra=takes(ChatRequest))
    async def chat_completions(request: Request) -> Response:
        _check_content_type(request)
        return await service.answer(request, of_chats)

    @app.post("/v1/completions", responses=_COMPLETION, openapi_extra=takes(CompletionRequest))
    async def completions(request: Request) -> Response:
        _check_content_type(request)
        return await service.answer(request, of_completions)


def _check_content_type(request: Request) -> None:
    """Refuse the types that a browser sends for a page of another site."""
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


def _add_page(app: FastAPI) -> None:
    for path, (name, media_type) in _FILES.items():
        content = (_FOLDER / name).read_bytes()
        app.add_api_route(path, _giving(content, media_type), include_in_schema=False)


def _giving(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return give


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        """Replace the framework's plain text. The middleware still gets the error."""
        return broken().response()

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        return ApiError(error.status_code, str(error.detail), headers=headers).response()
