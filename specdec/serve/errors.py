"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import Response


class ApiError(Exception):
    """A request that is answered with an error; the message is for the client."""

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

    @property
    def body(self) -> dict[str, Any]:
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, _type_of(self.status)),
                "param": self.param,
                "code": self.code,
            }
        }

    def response(self) -> JsonResponse:
        return JsonResponse(self.body, self.status, headers=self.headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


def _type_of(status: int) -> str:
    return "invalid_request_error" if status < 500 else "server_error"


class JsonResponse(Response):
    """JSON in ASCII: text that came in with lone surrogates goes out, too."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


def to_json(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


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
