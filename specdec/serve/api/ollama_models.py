"""Ollama's routes that describe the model: /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

import hashlib
import math
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from specdec import __version__
from specdec.serve.api.ollama import ShowRequest
from specdec.serve.api.ollama_answer import (
    OllamaModel,
    OllamaModels,
    OllamaShow,
    OllamaVersion,
    as_time,
)
from specdec.serve.api.reading import read_request
from specdec.serve.errors import OllamaError
from specdec.serve.middleware import BODY
from specdec.serve.openapi import errors_of, gives, takes
from specdec.serve.responses import JsonResponse
from specdec.serve.router.runner import ModelRunner
from specdec.serve.routes import check_content_type
from specdec.serve.service import Service

_NEVER = "9999-12-31T23:59:59Z"  # the model is not unloaded
_ERRORS = errors_of(OllamaError)


def add_ollama_models(app: FastAPI, service: Service) -> None:
    def models(*runners: ModelRunner, **more: Any) -> list[OllamaModel]:
        return [_model(service, item, name, **more) for item in runners for name in item.names]

    @app.get("/api/tags", responses=_ERRORS | gives(OllamaModels, "The models, by their names"))
    async def tags() -> Response:
        return JsonResponse(OllamaModels(models=models(*service.router.runners)))

    @app.get("/api/ps", responses=_ERRORS | gives(OllamaModels, "The loaded models"))
    async def ps() -> Response:
        runners = [runner for runner in service.router.runners if runner.replicas.beats]
        loaded = [item for runner in runners for item in models(runner, **_loaded(runner))]
        return JsonResponse(OllamaModels(models=loaded))

    @app.get("/api/version", responses=_ERRORS | gives(OllamaVersion, "The version"))
    async def version() -> Response:
        return JsonResponse(OllamaVersion(version=__version__))

    shown = gives(OllamaShow, "The model")

    @app.post("/api/show", responses=_ERRORS | shown, openapi_extra=takes(ShowRequest))
    async def show(request: Request) -> Response:
        check_content_type(request)
        body = read_request(request.scope[BODY].content, ShowRequest)
        return JsonResponse(_shown(service, service.router.find(body.model or body.name)))


def _loaded(runner: ModelRunner) -> dict[str, Any]:
    """Return the fields of a loaded model."""
    fields: dict[str, Any] = {"context_length": runner.model.max_context}
    is_kept = math.isinf(runner.keep_alive)
    fields["expires_at"] = _NEVER if is_kept else as_time(runner.expires_at)
    share = runner.options.share
    if share is not None:
        fields |= {"size": share.host_bytes + share.vram_bytes, "size_vram": share.vram_bytes}
    return fields


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _model(service: Service, runner: ModelRunner, name: str, **more: Any) -> OllamaModel:
    return OllamaModel(
        name=name,
        model=name,
        modified_at=as_time(service.created),
        digest=hashlib.sha256(runner.name.encode()).hexdigest(),
        details=_details(),
        **{"size": 0, **more},
    )


def _shown(service: Service, runner: ModelRunner) -> OllamaShow:
    if service.router.only is None and not runner.has_been_loaded:
        template, tools, length = "", [], runner.options.ctx_size
    else:
        template, length = runner.model.chat_template, runner.model.max_context
        tools = ["tools"] if runner.model.knows_tools else []
    return OllamaShow(
        modelfile="",
        parameters="",
        template=template,
        details=_details(),
        model_info={
            "general.architecture": "specdec",
            "general.basename": runner.name,
            "specdec.context_length": length,
        },
        capabilities=["completion", *tools],
        modified_at=as_time(service.created),
    )
