"""Ollama's routes that describe the model: /api/tags, /api/show, /api/ps and /api/version."""

from __future__ import annotations

import hashlib
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
from specdec.serve.routes import check_content_type, check_model
from specdec.serve.service import Service

_NEVER = "9999-12-31T23:59:59Z"  # the model is not unloaded
_ERRORS = errors_of(OllamaError)


def add_ollama_models(app: FastAPI, service: Service) -> None:
    def models(**more: Any) -> OllamaModels:
        return OllamaModels(models=[_model(service, name, **more) for name in service.names])

    @app.get("/api/tags", responses=_ERRORS | gives(OllamaModels, "The model, by its names"))
    async def tags() -> Response:
        return JsonResponse(models())

    @app.get("/api/ps", responses=_ERRORS | gives(OllamaModels, "The loaded model"))
    async def ps() -> Response:
        length = service.model.max_context
        return JsonResponse(models(expires_at=_NEVER, context_length=length))

    @app.get("/api/version", responses=_ERRORS | gives(OllamaVersion, "The version"))
    async def version() -> Response:
        return JsonResponse(OllamaVersion(version=__version__))

    shown = gives(OllamaShow, "The model")

    @app.post("/api/show", responses=_ERRORS | shown, openapi_extra=takes(ShowRequest))
    async def show(request: Request) -> Response:
        check_content_type(request)
        body = read_request(request.scope[BODY].content, ShowRequest)
        check_model(body.model or body.name, service)
        return JsonResponse(_shown(service))


def _details() -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "",
        "family": "",
        "families": [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _model(service: Service, name: str, **more: Any) -> OllamaModel:
    return OllamaModel(
        name=name,
        model=name,
        modified_at=as_time(service.created),
        size=0,
        digest=hashlib.sha256(service.name.encode()).hexdigest(),
        details=_details(),
        **more,
    )


def _shown(service: Service) -> OllamaShow:
    model = service.model
    return OllamaShow(
        modelfile="",
        parameters="",
        template=model.chat_template,
        details=_details(),
        model_info={
            "general.architecture": "specdec",
            "general.basename": service.name,
            "specdec.context_length": model.max_context,
        },
        capabilities=["completion", *(["tools"] if model.knows_tools else [])],
        modified_at=as_time(service.created),
    )
