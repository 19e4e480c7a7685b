"""Error responses as OpenAI's clients expect them: a status, and `{"error": {message, type, param, code}}`.

Those of `/v1/messages` are what Anthropic's clients expect: `{"type": "error", "error": {type, message, ...}}`.
"""

from __future__ import annotations

import math

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from tandem.frontend.http.answer_shapes import Error, ErrorBody, ErrorDetails, MessagesError, MessagesErrorBody
from tandem.protocol.errors import Overloaded, RequestError, ServingError

_MESSAGES_PATH = "/v1/messages"
_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    503: "overloaded_error",
    504: "timeout_error",
}
_DETAILED_CODES = {"thread_not_found"}  # codes that Anthropic's SDK reads, and where it does


class BodyTooLarge(RequestError):
    """The request body is larger than `--max-body-bytes`."""

    status = 413
    code = "request_too_large"


class UnsupportedMediaType(RequestError):
    """The request body is not declared as JSON."""

    status = 415


class UnsupportedEncoding(RequestError):
    """The request body is compressed in a way that is not read here. The response names those that are."""

    status = 415
    code = "unsupported_content_encoding"


class ClientDisconnected(Exception):
    """The client has disconnected, so nobody reads the response."""


def error_body(message: str, error_type: str, param: str | None = None, code: str | None = None) -> Error:
    """Body of every error, in a response and in a stream."""
    return Error(ErrorBody(message, error_type, param, code))


def serving_error_body(exc: ServingError) -> Error:
    """Error body of one of our own errors."""
    return error_body(exc.message, exc.error_type, exc.param, exc.code)


def messages_error_body(body: Error, status: int | None = None) -> MessagesError:
    """An error body in Anthropic's shape, with `param` and `code` too. `status` is None in a stream."""
    error = body.error
    shown = MessagesErrorBody(error.message, messages_error_type(error.type, status), error.param, error.code)
    if error.code in _DETAILED_CODES:
        shown.details = ErrorDetails(error.code)
    return MessagesError(shown)


def messages_error_type(error_type: str, status: int | None = None) -> str:
    """Anthropic's word for a type of OpenAI's. `status` is None in a stream."""
    return _MESSAGES_TYPES.get(status or 0, "api_error" if error_type == "server_error" else error_type)


def is_messages_path(path: str) -> bool:
    """Whether a route of this path speaks as Anthropic's API does."""
    return path == _MESSAGES_PATH or path.startswith(_MESSAGES_PATH + "/")


def error_response(status: int, body: Error, headers: dict[str, str] | None = None, *, path: str = "") -> Response:
    """JSON response with an error body, in the shape of the request's path."""
    shown = messages_error_body(body, status) if is_messages_path(path) else body
    return Response(msgspec.json.encode(shown), status, headers, "application/json")


def serving_error_response(exc: ServingError, path: str) -> Response:
    """Response to a request of this path for an error that comes before the first token."""
    headers = _retry_headers(exc.retry_after_s) if isinstance(exc, Overloaded) else None
    if isinstance(exc, UnsupportedEncoding):
        headers = {"accept-encoding": "gzip, deflate"}
    return error_response(exc.status, serving_error_body(exc), headers, path=path)


def _retry_headers(retry_after_s: float) -> dict[str, str]:
    """Whole seconds, as the standard says, and milliseconds, which OpenAI's clients read first."""
    return {
        "retry-after": str(max(1, math.ceil(retry_after_s))),
        "retry-after-ms": str(max(1, math.ceil(retry_after_s * 1e3))),
    }


def internal_error_body() -> Error:
    """Error body for a bug of ours. The details are only in the log."""
    return error_body("Internal server error.", "server_error", code="internal_error")


def internal_error_response(path: str) -> Response:
    """Response to a request of this path for a bug of ours."""
    return error_response(500, internal_error_body(), path=path)


def http_exception_response(request: Request, exc: Exception) -> Response:
    """Response for an unknown route or method, as a Starlette exception handler."""
    assert isinstance(exc, HTTPException), exc
    message = str(exc.detail)
    if exc.status_code in (404, 405):
        message = f"{message}: {request.method} {request.url.path[:200]}"
    headers = dict(exc.headers) if exc.headers else None
    body = error_body(message, "invalid_request_error")
    return error_response(exc.status_code, body, headers, path=request.url.path)
