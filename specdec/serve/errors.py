"""Errors in OpenAI's shape: {"error": {message, type, param, code}}."""

from __future__ import annotations

from specdec.serve.responses import ErrorDetail, ErrorResponse, JsonResponse


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

    @property
    def body(self) -> ErrorResponse:
        kind = _TYPES.get(self.status)
        kind = kind or ("invalid_request_error" if self.status < 500 else "server_error")
        detail = ErrorDetail(message=self.message, type=kind, param=self.param, code=self.code)
        return ErrorResponse(error=detail)

    def response(self) -> JsonResponse:
        return JsonResponse(self.body, self.status, headers=self.headers)


_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}


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
