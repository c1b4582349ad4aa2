"""Errors, in the shape of the API that was called; OpenAI's unless the path is another's."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from typing import Any, Literal

from specdec.serve.responses import ErrorDetail, ErrorResponse, JsonResponse, ResponseModel

ANTHROPIC_PATHS, OLLAMA_PATHS = "/v1/messages", "/api/"


class AnthropicErrorDetail(ResponseModel):
    type: str
    message: str


class AnthropicError(ResponseModel):
    type: Literal["error"]
    error: AnthropicErrorDetail


class OllamaError(ResponseModel):
    error: str


class ApiError(Exception):
    """Error response to a request; the message is for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it with its fields: the engine's process raises it, the server answers with it."""
        return _error_of, (self.status, self.message, self.param, self.code, self.headers)

    @property
    def body(self) -> ErrorResponse:
        """OpenAI's shape: {"error": {message, type, param, code}}."""
        kind = _TYPES.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=detail)

    def response(self, path: str = "") -> JsonResponse:
        """Return the response to a request of this path."""
        body: ResponseModel = self.body
        if path.startswith(ANTHROPIC_PATHS):
            body = anthropic_error(self)
        elif path.startswith(OLLAMA_PATHS):
            body = OllamaError(error=self.message)
        return JsonResponse(body, self.status, headers=self.headers)


def _error_of(
    status: int, message: str, param: str | None, code: str | None, headers: dict[str, str]
) -> ApiError:
    return ApiError(status, message, param=param, code=code, headers=headers)


def anthropic_error(error: ApiError) -> AnthropicError:
    kind = _ANTHROPIC_TYPES.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "api_error")
    detail = AnthropicErrorDetail(type=kind, message=error.message)
    return AnthropicError(type="error", error=detail)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def described_fault(error: BaseException) -> str:
    """Return the kind of an error and where it was raised, without its text: that may quote a
    client."""
    last = traceback.extract_tb(error.__traceback__)[-1:]
    where = "".join(f" at {item.name}, line {item.lineno}" for item in last)
    return f"{type(error).__name__}{where} (--debug)"


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def draining() -> ApiError:
    return ApiError(
        503, "the server is shutting down: ask another one", headers={"Retry-After": "5"}
    )


def broken() -> ApiError:
    return ApiError(500, "an error inside the server; its log says where")


def loading() -> ApiError:
    return ApiError(503, "the model is being loaded: ask again", headers={"Retry-After": "5"})


def not_loaded(name: str) -> ApiError:
    return ApiError(
        503, f"the model {name} is not loaded: send it a request first", code="model_not_loaded"
    )


def load_failed(name: str) -> ApiError:
    return ApiError(
        503,
        f"the model {name} could not be loaded; the server's log says why",
        code="model_load_failed",
    )


def no_such_model(near: Sequence[str], names: Sequence[str]) -> ApiError:
    """Return the error of an unknown name. near: names like it; names: all names."""
    hint = f"did you mean {' or '.join(near)}?" if near else f"there is {', '.join(names)}"
    return ApiError(
        404, f"there is no such model here: {hint}", param="model", code="model_not_found"
    )


def engine_lost() -> ApiError:
    return ApiError(
        503,
        "the engine ended unexpectedly and is started again: ask again",
        code="engine_lost",
        headers={"Retry-After": "5"},
    )


def engine_failed() -> ApiError:
    return ApiError(
        503,
        "the engine ended again and again, and is not started any more; the server's log says why",
        code="engine_failed",
    )
