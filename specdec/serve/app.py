"""Routes, the page at /, and the framework's errors in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from specdec import __version__
from specdec.serve.api.budget import BudgetRequest, BudgetResponse
from specdec.serve.api.ollama_models import add_ollama_models
from specdec.serve.api.tokens import Properties, properties
from specdec.serve.errors import ApiError, broken
from specdec.serve.middleware import OPEN_PATH, LimitMiddleware
from specdec.serve.openapi import ERRORS, Responses, gives, takes, with_models
from specdec.serve.responses import Health, JsonResponse, ModelCard, ModelList, ModelStatus
from specdec.serve.router.budget import Budget
from specdec.serve.router.runner import ModelRunner
from specdec.serve.router.states import (
    FAILED,
    FAILING,
    READY,
    RESTARTING,
    STARTING,
    UNLOADING,
    WAITING,
)
from specdec.serve.routes import Routes, check_content_type
from specdec.serve.service import Service

_HEALTH = gives(Health, "Ready") | gives(Health, "Not ready", 503)
_BUDGET = gives(BudgetResponse, "Figures of the plan")
_PLAN: Responses = {200: {"description": "The plan, as `specdec plan --json` prints it"}}

_FOLDER = Path(__file__).parent / "page"
_MAX_PATH = 200
"""Characters of a path that an error quotes."""
_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript"}
_HEADERS = {
    # Only the page's own files and this server; generated text that looks like HTML stays text.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


RequestLog = Callable[[str, int, float], None]
"""Gets the path, the status (0: none was sent) and the seconds of each request."""


def make_app(
    service: Service,
    budget: Budget,
    key: str | None,
    *,
    is_debug: bool = False,
    log: RequestLog | None = None,
) -> ASGIApp:
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
    _add_budget(app, budget)
    _add_models(app, service)
    Routes(app, service).add_all()
    add_ollama_models(app, service)
    _add_page(app)
    _add_errors(app)
    routes_schema = app.openapi
    app.openapi = lambda: with_models(routes_schema(), service.options)  # type: ignore[method-assign]
    paths = frozenset(route.path for route in app.routes if hasattr(route, "path"))

    def on_end(path: str, status: int, seconds: float) -> None:
        service.metrics.add_request(path, status, seconds)
        if log is not None:
            log(path, status, seconds)

    limited = LimitMiddleware(app, service.options, key, paths, on_end, is_debug)
    if not service.options.cors_origins:
        return limited
    return CORSMiddleware(
        limited,
        allow_origins=service.options.cors_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
    )


def _add_status(app: FastAPI, service: Service) -> None:
    @app.get(OPEN_PATH, responses=_HEALTH)
    async def health() -> Response:
        """Return the state: starting, ready, restarting, failing, failed or draining."""
        state = service.state
        made = Health(status=state)
        if service.router.only is None:
            made.models = {runner.name: runner.state for runner in service.router.runners}
        elif len(service.router.only.replicas) > 1:
            made.replicas = [replica.state for replica in service.router.only.replicas]
        errors = _errors(service)
        if errors:
            made.errors = errors
        return JsonResponse(made, 200 if state == "ready" else 503)

    @app.get("/metrics", response_class=PlainTextResponse)
    async def metrics() -> Response:
        """Return metrics for Prometheus."""
        await service.router.refresh()
        return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/plan", responses=_PLAN)
    async def plan(model: str | None = None) -> Response:
        """Return the memory plan and the predicted speed."""
        return JsonResponse(service.router.find(model).model.plan)

    @app.get("/props", responses=gives(Properties, "The properties"))
    async def props(model: str | None = None) -> Response:
        """Return llama.cpp's properties of a server."""
        runner = service.router.find(model)
        return JsonResponse(properties(runner.name, runner.model, len(runner.replicas)))


def _errors(service: Service) -> list[str]:
    """Return why engines are not started any more."""
    is_only = service.router.only is not None
    return [
        reason if is_only else f"{runner.name}, {reason}"
        for runner in service.router.runners
        for reason in runner.replicas.given_up
    ]


def _add_budget(app: FastAPI, budget: Budget) -> None:
    @app.get("/v1/budget", responses=_BUDGET)
    async def present(model: str | None = None) -> Response:
        """Return figures of the present memory budget."""
        return JsonResponse(budget.present(model))

    @app.post("/v1/budget", responses=_BUDGET, openapi_extra=takes(BudgetRequest))
    async def change(request: Request, model: str | None = None) -> Response:
        """Change the memory budget of a loaded model, between two passes."""
        check_content_type(request)
        return JsonResponse(await budget.change(request, model))


def _add_models(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", responses=gives(ModelList, "The models, by each of their names"))
    async def models() -> Response:
        cards = [
            _card(service, runner, name)
            for runner in service.router.runners
            for name in runner.names
        ]
        return JsonResponse(ModelList(object="list", data=cards))

    @app.get("/v1/models/{name:path}", responses=gives(ModelCard, "The model"))
    async def model(name: str) -> Response:
        return JsonResponse(_card(service, service.router.named(name), name))


def _card(service: Service, runner: ModelRunner, name: str) -> ModelCard:
    facts: dict[str, Any] = {"max_model_len": runner.options.ctx_size}
    is_only = service.router.only is not None
    if is_only or runner.has_been_loaded:
        facts |= {
            "max_model_len": runner.model.max_context,
            "has_chat_template": runner.model.has_chat_template,
        }
    if len(runner.replicas) > 1:
        facts["replicas"] = len(runner.replicas.open_engines)
    if not is_only:
        facts["status"] = _status(runner)
    return ModelCard(
        id=name,
        object="model",
        created=service.created,
        owned_by="specdec",
        **facts,
    )


def _status(runner: ModelRunner) -> ModelStatus:
    value = "unloaded"
    if runner.state in (READY, FAILING, UNLOADING):
        value = "loaded"
    elif runner.state in (STARTING, RESTARTING, WAITING):
        value = "loading"
    is_failed = runner.state == FAILED or (value == "unloaded" and runner.load_error is not None)
    return ModelStatus.model_validate({"value": value, **({"failed": True} if is_failed else {})})


def _add_page(app: FastAPI) -> None:
    files = {"/": (_FOLDER / "index.html", "text/html")}
    for path in sorted(_FOLDER.rglob("*")):
        if path.suffix in _MEDIA_TYPES:
            name = path.relative_to(_FOLDER).as_posix()
            files[f"/page/{name}"] = (path, _MEDIA_TYPES[path.suffix])
    for route, (path, media_type) in files.items():
        give = _giving(path.read_bytes(), media_type)
        app.add_api_route(route, give, include_in_schema=False)


def _giving(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def give() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return give


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(request: Request, error: ApiError) -> Response:
        return error.response(request.url.path)

    @app.exception_handler(Exception)
    async def unforeseen(request: Request, error: Exception) -> Response:
        """Replace the framework's plain text. The middleware still gets the error."""
        return broken().response(request.url.path)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> Response:
        headers = dict(error.headers or {})
        message, path = str(error.detail), request.url.path[:_MAX_PATH]
        if error.status_code == 404:
            message = f"there is no {request.method} {path} here"
        elif error.status_code == 405:
            message = f"{path} takes {headers.get('Allow', 'another method')}, not {request.method}"
        made = ApiError(error.status_code, message, headers=headers)
        return made.response(request.url.path)
