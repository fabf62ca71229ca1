"""Every error that an HTTP client can see, in one shape: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from engine.types import ErrorInfo

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
_log = structlog.get_logger(__name__)
QUEUE_RETRY_SECONDS = 1


class ApiError(Exception):
    """An answer that is an error.

    Args:
        status: HTTP status, also where the error is sent inside a stream that began with 200.
        message: For people; never holds text of the request beyond a name or a number.
        type: ``invalid_request_error``, ``rate_limit_error`` or ``server_error``.
        param: The request field at fault, as in ``messages[0].content``.
        code: For programs; stable.
        headers: Extra response headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The error object."""
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return {"error": error}


def bad_request(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """A 400 that names the field at fault."""
    return ApiError(400, message, param=param, code=code)


def model_not_found(name: str) -> ApiError:
    """A 404 for a model that is not served here."""
    message = f"The model {name[:200]!r} is not served here."
    return ApiError(404, message, param="model", code="model_not_found")


def unavailable(message: str, code: str, retry_after: int = 1) -> ApiError:
    """A 503 that a client may retry after ``retry_after`` seconds."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(503, message, type=SERVER_ERROR, code=code, headers=headers)


def request_timeout() -> ApiError:
    """A 504: the request ran longer than the server allows."""
    message = "The request was not complete within the time that this server allows."
    headers = {"x-should-retry": "false"}  # it would take as long again: official clients obey the header
    return ApiError(504, message, type=SERVER_ERROR, code="request_timeout", headers=headers)


def body_timeout() -> ApiError:
    """A 408: the body did not arrive in time. The connection is closed, for the rest may never come."""
    message = "The body was not complete within the time that this server allows."
    return ApiError(408, message, code="request_timeout", headers={"Connection": "close"})


def queue_full(why: str) -> ApiError:
    """A 429: there is no room now."""
    headers = {"Retry-After": str(QUEUE_RETRY_SECONDS)}
    message = f"The queue is full: {why}. Try again later."
    return ApiError(429, message, type="rate_limit_error", code="queue_full", headers=headers)


def engine_dead() -> ApiError:
    """A 503: the engine is gone, so the request was not, or not wholly, served."""
    return unavailable("The engine died; the request was not completed.", "engine_dead", retry_after=5)


def internal_error(message: str = "Internal error; the server's log has the details.") -> ApiError:
    """A 500 that says nothing of the inside."""
    return ApiError(500, message, type=SERVER_ERROR, code="internal_error")


def from_engine(error: ErrorInfo | None) -> ApiError:
    """What the engine said of a request that it ended with ``finish_reason="error"``."""
    if error is None:
        return internal_error()
    if error.code == "invalid_request":
        return bad_request(error.message, error.param)
    if error.code == "engine_dead":
        return engine_dead()
    if error.code == "numerical_error":
        # The engine has tried again already, and the weights stay the same: official clients obey the header
        headers = {"x-should-retry": "false"}
        return ApiError(500, error.message, type=SERVER_ERROR, code=error.code, headers=headers)
    if error.code == "unavailable":
        return unavailable(error.message, error.code)
    _log.error("engine_error", code=error.code, message=error.message)
    return internal_error()


def error_response(error: ApiError) -> Response:
    """The HTTP response of an error."""
    content = msgspec.json.encode(error.body())
    return Response(content, error.status, headers=error.headers, media_type="application/json")


async def _on_api_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError), f"handler of ApiError got {exc!r}"
    return error_response(exc)


async def _on_http_exception(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), f"handler of HTTPException got {exc!r}"
    codes = {404: "not_found", 405: "method_not_allowed"}
    path = request.url.path[:200]
    message = f"{request.method} {path}: {exc.detail}"
    headers = dict(exc.headers or {})
    if headers.get("Allow") == "GET":  # the router names one route's methods, and HEAD has a route of its own
        headers["Allow"] = "GET, HEAD"
    error = ApiError(exc.status_code, message, code=codes.get(exc.status_code, "http_error"), headers=headers)
    return error_response(error)


async def _on_validation_error(request: Request, exc: Exception) -> Response:
    # Reached only by path and query parameters: the service reads bodies itself.
    return error_response(bad_request("A path or query parameter is not valid."))


def install_error_handlers(app: FastAPI) -> None:
    """Give every error raised inside ``app``'s routes, and by its router, the one shape."""
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
